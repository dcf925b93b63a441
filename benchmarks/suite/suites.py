"""The suites: lists of cases, those of most worth first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from benchmarks.common.models import SIZES
from benchmarks.common.peers import KEPT_NAMES, OFFLOADED_NAMES
from benchmarks.suite.cases import Case

TORCH = ("torch checkpoint", "torch SAC", "torch SAC titan", "torch_remat", "torch_remat regions")
BUDGETS = tuple(f"torch budget dp {share}" for share in (0.1, 0.3, 0.5, 0.7, 0.9))
SOLVERS = tuple(f"torch budget {solver} {share}" for solver in ("ilp", "greedy") for share in (0.3, 0.7))
OURS = (
    "save_nothing",
    "save_matmuls",
    "save_weight_matmuls",
    "save_attention",
    "save_matmuls | save_attention",
)
# Policies that are no peer's, each of which keeps something else.
EVERY = (
    "save_everything",
    "offload(save_matmuls)",
    "offload(save_names('up'))",
    "save_every_nth(2, save_matmuls)",
    "save_larger_than('1MiB')",
    "save_costlier_than(256)",
    "save_all_but_names('gelu')",
    "save_names('up')",
    "~save_attention",
)
# What torchtitan's list keeps.
ALTERNATE = "save_every_nth(2, save_matmuls) | save_attention"
# What `torch_remat regions` keeps: attention with what its backward reads, not its result alone.
NAMED = "save_names('qkv', 'q', 'k', 'v', 'up', 'gate') | save_attention"
# Ours, and torch's row with the same verdicts.
PAIRS = {
    "save_nothing": "torch checkpoint",
    "save_matmuls": "torch SAC",
    ALTERNATE: "torch SAC titan",
    NAMED: "torch_remat regions",
}
# Torchtitan's list keeps every second of plain products, and all batched ones and convolutions.
UNLIKE = {("moe", ALTERNATE), ("unet", ALTERNATE)}
PLANNED = tuple(f"budget {share}" for share in (0.1, 0.3, 0.5, 0.7, 0.9))
# Peaks between the lowest that is found, and that of no remat.
FITS = ("fit 0.3", "fit 0.6")
# At the peak of full recomputation.
LEAN = "fit save_nothing"
JAX = ("jax none", "jax save_nothing", "jax save_matmuls", "jax save_weight_matmuls")
FUNCTIONAL = ("torch checkpoint", "torch_remat")
# Named values kept, in host memory, and computed again.
OFFLOAD = (KEPT_NAMES, OFFLOADED_NAMES, "save_nothing", "torch checkpoint")
MEMORY = ("none", "torch checkpoint", "torch SAC", "save_nothing", "save_matmuls")
REHEARSED = (*OFFLOAD[:2], "none", "torch checkpoint", "save_matmuls", *JAX[:2], LEAN)
# One thread on a CPU: what else a shared machine does takes another core then, not a part of each product.
THREADS = 1


def panel(model: str, mode: str, peers: Iterable[str], seconds: float, **options: Any) -> Case:
    return Case("panel", model, beside_jax(("none", *peers)), mode, seconds=seconds, **options)


def beside_jax(peers: Iterable[str]) -> tuple[str, ...]:
    """The rows with JAX's own step without a checkpoint before those with one: XLA may merge what is computed
    again with the forward, and its memory is no measure for torch's."""
    rows = [peer for peer in peers if peer != JAX[0]]
    first = next((i for i, peer in enumerate(rows) if peer.startswith("jax ")), None)
    return tuple(rows if first is None else [*rows[:first], JAX[0], *rows[first:]])


def quick() -> list[Case]:
    """What README shows, in CPU time over 20 rounds: every kind of case but compile times, in ten minutes."""
    gpt, llama = sizes(depth=4), sizes(depth=2)
    few = ("save_nothing", "save_matmuls", "budget 0.5")
    eager = (*TORCH, *OURS[:2], *OURS[3:], *PLANNED[1::2])
    compiled = (*TORCH[:2], TORCH[4], BUDGETS[3], *few, OURS[-1], JAX[1])
    found = on_cpu(
        panel("llama3-8b", "backward", compiled, 120, sizes=llama, compiled=True),
        panel("gpt2-medium", "backward", eager, 100, sizes=gpt),
        panel("gpt2-medium", "func", (*FUNCTIONAL, *few), 40, sizes=gpt),
        panel("gpt2-medium", "vmap", (*FUNCTIONAL, *few[:2]), 35, sizes=gpt),
        panel("llama3-8b", "step", few[:1], 25, sizes=llama, compiled=True),
        Case("records", "overhead", seconds=40),
    )
    found = [replace(case, clock="process", rounds=20) for case in found]
    plans = ("torch budget dp 0.5", "torch budget greedy 0.5", "budget 0.5")
    return [
        *found,
        *on_cpu(
            *depths("gpt2-medium", (1, 4, 8), 4),
            fit("llama3-8b", "batch", 1, 48, MEMORY, 10, sizes=llama, clock="process"),
            Case("plan", "gpt2-medium", plans, sizes=gpt, seconds=6),
        ),
    ]


def depths(model: str, blocks: Iterable[int], seconds: float) -> list[Case]:
    """Memory against depth; time is left out."""
    small = {"width": 128, "heads": 2, "seq": 128}
    peers = (*MEMORY[1:], "budget 0.5")
    return [panel(model, "backward", peers, seconds, sizes=sizes(depth=depth, **small)) for depth in blocks]


def cpu() -> list[Case]:
    """All models and modes in sizes for a CPU: an hour, most of it compiling, which comes last."""
    rivals = (*TORCH, *OURS, ALTERNATE, "names", *PLANNED)
    swept = (
        *TORCH[:3], TORCH[4], *BUDGETS[1:4], *SOLVERS[1:3], *OURS[:2], OURS[-1], ALTERNATE, "names",
        *PLANNED[1:4], *JAX[:3],
    )  # fmt: skip
    plans = ("torch budget dp 0.5", "torch budget ilp 0.5", "torch budget greedy 0.5", "budget 0.5")
    compiled = {"compiled": True, "rounds": 5}
    two = sizes(depth=2)
    shallow = {
        model: sizes(depth=3) if model == "unet" else sizes(depth=1) if "128k" in model else two
        for model in SIZES
    }
    found = on_cpu(
        *(panel(m, "backward", rivals, 45, rounds=5, sizes=size) for m, size in shallow.items()),
        panel("gpt2-medium", "backward", EVERY, 25, rounds=5, sizes=sizes(depth=1)),
        *(
            panel("gpt2-medium", mode, (*FUNCTIONAL, *OURS), 30, rounds=5, sizes=two)
            for mode in ("func", "vmap", "scan")
        ),
        *depths("gpt2-medium", (1, 2, 4, 8, 16, 32, 64), 15),
        Case("records", "overhead", rounds=40, seconds=30),
        Case("records", "memory", seconds=30),
        *(Case("plan", m, plans, seconds=20) for m in ("gpt2-medium", "moe", "vit-l")),
        # Torch's planner takes functional graphs only, which a Llama's in eager is not.
        Case("plan", "llama3-8b", plans[-1:], seconds=20),
        fit("llama3-8b", "batch", 1, 64, (*MEMORY, "budget 0.5"), 40, sizes=two),
        fit("llama3-8b", "seq", 64, 64, (*MEMORY, "budget 0.5"), 40, sizes=two),
        panel("gpt2-medium", "backward", swept, 300, sizes=two, **compiled),
        panel("llama3-8b", "blocks", (*TORCH, *OURS, "names", "budget 0.5"), 150, **compiled),
        *(
            panel("gpt2-medium", mode, (*FUNCTIONAL[:1], *OURS[:2], *JAX[1:3]), 70, sizes=two, **compiled)
            for mode in ("func", "vmap", "step", "scan")
        ),
        *(
            panel(m, "backward", (*MEMORY[1:], "budget 0.5", *JAX[1:3]), 110, sizes=two, **compiled)
            for m in ("moe", "vit-l", "llama-32k")
        ),
        *(
            panel(m, "backward", (*MEMORY[1:], "budget 0.5"), 110, sizes=two, **compiled)
            for m in ("hf-llama", "unet")
        ),
        Case("compile", "gpt2-medium", MEMORY, compiled=True, seconds=120, sizes=two),
    )
    return [replace(case, clock="process") for case in found]


def plans() -> list[Case]:
    """Budgets against policies that anyone can write, at two depths: what `benchmarks.plans` checks.

    At a depth of 8 peaks are about kept values, at 2 often about one block. Compiled at a depth of 8: block
    by block.
    """
    peers = (*OURS, ALTERNATE, *PLANNED)
    # A short step takes more rounds for the same certainty.
    two = {"vit-l": 16, "hf-llama": 24, "moe": 24, "gpt2-medium": 10, "llama3-8b": 10, "hf-gpt2": 24}
    eight = {"hf-llama": 14, "moe": 12, "vit-l": 10, "gpt2-medium": 7, "llama3-8b": 7}
    sized = [(model, sizes(depth=2), count) for model, count in two.items()]
    sized += [("unet", sizes(depth=3), 16)]
    sized += [(model, sizes(depth=8), count) for model, count in eight.items()]
    # Whose attention takes longest.
    sized += [("gpt2-xl", sizes(depth=2), 10), ("llama-32k", sizes(depth=2), 7), ("llama-128k", (), 3)]
    longest = {"llama-128k": 300}
    eager = [
        panel(model, "backward", (*peers, *FITS), longest.get(model, 100), rounds=count, sizes=size)
        for model, size, count in sized
    ]
    whole = {model: (sizes(depth=2), 20) for model in (*eight, "hf-gpt2")}
    whole |= {"unet": (sizes(depth=3), 10), "llama-32k": (sizes(depth=2), 5)}
    compiled = [
        panel(model, "backward", peers, 300, rounds=count, sizes=size, compiled=True)
        for model, (size, count) in whole.items()
    ]
    compiled += [
        panel(model, "blocks", peers, 300, rounds=20, sizes=sizes(depth=8), compiled=True) for model in eight
    ]
    return [replace(case, clock="process") for case in on_cpu(*eager, *compiled)]


def pairs() -> list[Case]:
    """Compiled steps of ours and of torch's rows with the same verdicts, in turns: which is faster."""
    peers = (*PAIRS, *PAIRS.values())
    found = on_cpu(
        *(
            panel(model, "backward", peers, 60 * depth, rounds=30, sizes=sizes(depth=depth), compiled=True)
            for depth in (2, 8)
            for model in ("llama3-8b", "gpt2-medium")
        )
    )
    return [replace(case, clock="process") for case in found]


def card() -> list[Case]:
    """Published sizes in bfloat16 on one GPU: ten minutes with `--jobs 9`, what matters most first.

    Whole graphs are those that `benchmarks.graphs` compiles for a card: the simulation is held against these.
    Deep models are compiled block by block, in seconds whatever their depth.
    """
    main = (
        *TORCH[:3], "torch_remat regions", "save_nothing", "save_matmuls", OURS[-1], ALTERNATE, NAMED,
        BUDGETS[2], *PLANNED[1:4], *JAX[1:3],
    )  # fmt: skip
    whole = (
        *TORCH[:3],
        "torch_remat regions",
        *OURS[:2],
        OURS[-1],
        ALTERNATE,
        NAMED,
        BUDGETS[2],
        *PLANNED[1:3],
    )
    short = (*TORCH[:2], *OURS[:2], OURS[-1], PLANNED[2])
    functional = (*OURS[:2], OURS[-1], PLANNED[2])
    few = (*MEMORY[1:], PLANNED[2])
    compiled = {"compiled": True, "rounds": 8}
    return on_gpu(
        panel("llama3-8b", "blocks", main, 60, compiled=True, rounds=6, sizes=sizes(depth=8)),
        panel("llama3-8b", "backward", whole, 60, **compiled),
        panel("llama3-8b", "step", (*functional, *JAX[1:3]), 30, **compiled, sizes=sizes(depth=2)),
        panel("llama3-8b", "func", functional, 30, **compiled, sizes=sizes(depth=2)),
        panel("llama3-8b", "scan", (*MEMORY[1:], *JAX[1:3]), 30, **compiled, sizes=sizes(depth=2)),
        panel("llama-32k", "backward", short, 40, compiled=True, rounds=4),
        panel("gpt2-xl", "backward", short, 40, **compiled),
        panel("moe", "backward", short, 40, **compiled, sizes=sizes(depth=4)),
        panel("vit-l", "backward", short, 40, **compiled, sizes=sizes(depth=4)),
        panel("hf-llama", "backward", few, 30, **compiled, sizes=sizes(depth=4)),
        panel("unet", "backward", few, 40, **compiled),
        # In eager: offload, and a fit at the peak of full recomputation.
        panel("llama3-8b", "backward", (*OFFLOAD, LEAN), 30, rounds=6, alone=True, sizes=sizes(depth=8)),
        panel("llama3-8b", "backward", (*TORCH, *OURS, ALTERNATE, *PLANNED[::2]), 30, rounds=6, alone=True),
        panel("gpt2-medium", "vmap", (*FUNCTIONAL, *few[2:]), 15, rounds=6, alone=True, sizes=sizes(depth=8)),
        panel(
            "llama3-8b", "blocks", few[:-1], 60, compiled=True, rounds=3, alone=True, sizes=sizes(depth=32)
        ),
        fit("llama3-8b", "batch", 1, 70 << 10, few[:-1], 60, sizes=sizes(seq=4096)),
        panel("llama-128k", "backward", few[:-1], 60, compiled=True, rounds=2, alone=True),
        Case("compile", "llama3-8b", ("none", *TORCH[:1], OURS[0]), compiled=True, seconds=25),
    )


def rehearsal() -> list[Case]:
    """Every case of `card` in miniature on a CPU: what breaks there at any size should break here first."""
    found: dict[str, Case] = {}
    for case in card():
        small = {"width": 64, "heads": 4, "seq": 32, "batch": 2} | {"depth": 2}
        if case.model == "unet":
            small = {"width": 16, "seq": 8, "batch": 2, "depth": 2}
        if case.model.startswith("llama"):
            small |= {"groups": 2, "hidden": 128}
        limits = {"limit": 2 << 20, "step": 32 if case.vary == "seq" else 1} if case.vary else {}
        sized = {} if case.kind == "records" else {"sizes": sizes(**small)}
        # Every peer once, in the first case.
        peers = tuple(name for name in case.peers if not found or name in REHEARSED)
        made = replace(case, device="cpu", peers=peers, rounds=min(case.rounds, 1), **sized, **limits)
        # Models of 8 and of 32 layers are the same one here.
        found.setdefault(made.name, made)
    return list(found.values())


def versions() -> list[Case]:
    """Small cases for every interpreter that is named, compiled ones too."""
    few = ("torch checkpoint", "torch SAC", "save_nothing", "save_matmuls", "budget 0.5")
    # What separates us from torch's checkpoint in so small a model: see docs/measured/benchmarks.md.
    planned = (*few, "torch budget dp 0.5", *(f"{few[i]} without buffer reuse" for i in (0, 2)))
    small, two = sizes(depth=1), sizes(depth=2)
    found = on_cpu(
        panel("gpt2-medium", "backward", few, 15, rounds=5, sizes=two),
        panel("gpt2-medium", "func", few, 12, rounds=5, sizes=two),
        panel("gpt2-medium", "vmap", ("save_nothing", "save_matmuls"), 12, rounds=5, sizes=two),
        Case("records", "overhead", rounds=30, seconds=15),
        panel("llama3-8b", "backward", planned, 80, rounds=5, sizes=two, compiled=True),
        panel(
            "gpt2-medium", "func", ("save_nothing", "save_matmuls"), 30, rounds=5, sizes=small, compiled=True
        ),
    )
    return [replace(case, clock="process") for case in found]


SUITES: dict[str, Callable[[], list[Case]]] = {
    "quick": quick,
    "cpu": cpu,
    "plans": plans,
    "pairs": pairs,
    "card": card,
    "rehearsal": rehearsal,
    "versions": versions,
}


def sizes(**values: int) -> tuple[tuple[str, int], ...]:
    return tuple(values.items())


def fit(
    model: str, vary: str, step: int, mib: int, peers: Iterable[str], seconds: float, **options: Any
) -> Case:
    shared = {"vary": vary, "step": step, "limit": mib << 20, "seconds": seconds, "rounds": 3}
    return Case("fit", model, tuple(peers), **shared | options)


def on_cpu(*cases: Case) -> list[Case]:

    return [replace(case, threads=THREADS) for case in cases]


def on_gpu(*cases: Case) -> list[Case]:

    # The overhead of a region is that of the CPU on every machine.
    return [
        case if case.kind == "records" else replace(case, device="cuda", dtype="bfloat16") for case in cases
    ]
