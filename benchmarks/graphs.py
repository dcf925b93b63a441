"""Compiled graphs for a GPU that need not be there: peak, kept bytes and roofline time of every peer.

    python -m benchmarks.graphs --models llama3-8b --modes backward step

Models in their published sizes, in bfloat16, on fake tensors. All figures are compiled for the card, not run
on it (`remat.gpu`): they are counts, the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import tyro
from einops import rearrange
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common.measures import recover, told
from benchmarks.common.models import HuggingFace, Problem, drawn, named
from benchmarks.common.peers import peer
from benchmarks.common.records import Record, Target, conclude, ratio
from benchmarks.common.steps import make_step
from benchmarks.suite.graph_tables import LIMITS
from benchmarks.suite.suites import OURS, PAIRS, UNLIKE
from remat.gpu import MARK, GpuReport, compile_for

BOTH = "save_matmuls | save_attention"
SHORT = ("none", *PAIRS, *PAIRS.values(), BOTH, "budget 0.5", "torch budget dp 0.5")
EVERY = (
    *SHORT,
    *(name for name in (*OURS, "names", "torch_remat") if name not in SHORT),
    *(f"{kind} {share}" for share in (0.3, 0.7) for kind in ("budget", "torch budget dp")),
)
FEW = ("none", "save_nothing", "save_matmuls", "torch checkpoint", "torch SAC")
FUNCTIONAL = (*FEW, BOTH, "budget 0.5", "torch_remat", "torch_remat regions")


SHALLOW = {"gpt2-xl": 2, "moe": 2, "vit-l": 2, "llama-32k": 2, "llama-128k": 1}


@dataclass(frozen=True)
class Panel:
    """One model in one mode of `benchmarks.common.steps`, and its rows.

    Equal blocks beyond a few tell nothing new, and each takes seconds of compiling.
    """

    model: str
    depth: int
    mode: str = "backward"
    peers: tuple[str, ...] = EVERY


PANELS = (
    Panel("llama3-8b", 8, peers=SHORT),
    Panel("llama3-8b", 4),
    Panel("llama3-8b", 2, "func", FUNCTIONAL),
    Panel("llama3-8b", 2, "step", FUNCTIONAL),
    Panel("llama3-8b", 2, "scan", FEW),
    Panel("llama3-8b", 32, peers=FEW),
    Panel("llama-32k", 2),
    Panel("llama-128k", 1),
    Panel("gpt2-xl", 8, peers=SHORT),
    Panel("moe", 4),
    Panel("vit-l", 24, peers=(*FEW, BOTH)),
    Panel("vit-l", 4),
    Panel("unet", 4),
    Panel("hf-llama", 4),
    # The other modes of every model, in few blocks.
    *(
        Panel(model, depth, mode, FUNCTIONAL)
        for model, depth in {**SHALLOW, "hf-llama": 2, "unet": 2}.items()
        for mode in ("func", "step")
    ),
    *(Panel(model, depth, "scan", FEW) for model, depth in SHALLOW.items() if depth > 1),
)


@dataclass
class Graphs:
    """Peak memory and roofline time of a compiled step of each peer, for a GPU."""

    models: tuple[str, ...] = tuple(dict.fromkeys(panel.model for panel in PANELS))
    """Models, by their names in `benchmarks.common.models.SIZES`."""
    modes: tuple[str, ...] = ("backward", "func", "step", "scan")
    """Modes of `benchmarks.common.steps`."""
    peers: tuple[str, ...] = ()
    """Rows; none: those of each panel."""
    device: str = "h100"
    """a100, h100, h200 or b200."""
    depth: int = 0
    """Blocks; 0: as in `PANELS`."""
    save: bool = True
    """Write results/graphs.csv; what it holds of other panels stays."""

    def __call__(self) -> int:
        missed = 0
        for panel in self.panels():
            records = list(run(panel, self.device))
            title = f"{panel.model}, {panel.mode} for {self.device}: {MARK}"
            missed += conclude("graphs", title, records, targets(records), self.save, beside=True)
        return int(bool(missed))

    def panels(self) -> list[Panel]:
        """Those of the models and modes asked for, as they are to be run."""
        wanted = [p for p in PANELS if p.model in self.models and p.mode in self.modes]
        made = [replace(p, depth=self.depth or p.depth, peers=self.peers or p.peers) for p in wanted]
        return list({(p.model, p.mode, p.depth): p for p in made}.values())


def run(panel: Panel, device: str) -> Iterator[Record]:
    """Rows of one panel."""
    built: Any = named(panel.model, "cuda", depth=panel.depth)
    mode = f"{panel.model}, {built.depth} blocks, {built.batch} x {built.seq}, {device}, {panel.mode}"
    # What einops sets up at its first call is nothing that a compiler may see.
    rearrange(torch.zeros(1, 1), "a b -> b a")
    stacked = panel.mode == "scan"
    if isinstance(built, HuggingFace):  # its weights cannot be cast as fake tensors
        problem = built.problem(torch.device("meta"), torch.bfloat16, 0)
    else:
        drawn.cache_clear()  # fake tensors of another mode
        with FakeTensorMode():
            problem = built.problem(torch.device("cpu"), torch.bfloat16, 0, stacked)
    for name in panel.peers:
        try:
            yield from rows(mode, name, compiled(problem, panel.mode, name, device))
        except Exception as error:
            yield replace(Record("graphs", mode, name, "peak", "MiB"), error=told(error))
            recover(error)


def compiled(problem: Problem, mode: str, name: str, device: str) -> GpuReport:
    """The report of one peer's step: the loss and its gradient by all parameters, or what `mode` says."""
    loss, leaves = problem.bind(peer(name).around)
    found: list[Callable[..., Any]] = []

    def compiler(fn: Callable[..., Any]) -> Callable[..., Any]:
        found.append(fn)
        return fn

    make_step(mode, loss, leaves, compiler)
    params = problem.params if mode in ("func", "step") else leaves(problem.params)
    rate = (torch.zeros(()),) if mode == "step" else ()
    with peer(name).compiling():
        return compile_for(device, found[0], params, problem.batch, *rate, machine_code=False)


def rows(mode: str, name: str, report: GpuReport) -> Iterator[Record]:
    for metric, unit, value in (
        ("peak", "MiB", report.peak / 2**20),
        ("kept", "MiB", report.kept / 2**20),
        ("roofline", "ms", 1e3 * report.seconds),
        ("FLOPs", "TFLOP", report.flops / 1e12),
        ("launches", "kernels", len(report.kernels)),
        ("survived", "regions", sum(region.survived for region in report.regions)),
    ):
        yield Record("graphs", mode, name, metric, unit, value)


def targets(records: list[Record]) -> list[Target]:
    """What issue 17 asks for."""
    found = []
    for mode in dict.fromkeys(record.mode for record in records):
        there = {record.policy for record in records if not record.error}
        for policy, rival in PAIRS.items():
            if rival not in there or (mode.partition(",")[0], policy) in UNLIKE:
                continue
            for metric, limit in LIMITS.items():
                share = ratio([r for r in records if r.metric == metric], mode, policy, rival)
                found.append(Target(f"{mode}: {metric} of {policy} over {rival}", share, limit))
    return found


if __name__ == "__main__":
    raise SystemExit(tyro.cli(Graphs)())
