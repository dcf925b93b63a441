"""What a compiled scan costs: CPU seconds to compile it, short and long, and time a step against a loop.

    python -m benchmarks.scan_in_compile [--backend inductor] [--repeats 5]

Compiling is timed as the first gradient less what runs steps in it, in CPU seconds of this process, with the
compiler's caches off; lengths take turns, so that drift of the machine meets all alike, and medians
are compared. Times a step are those of whole gradients of an RNN 64 wide, ways taking turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config
import tyro

from benchmarks.records import Record, Target, save, show
from benchmarks.scan_memory import installed
from benchmarks.scan_ways import cell, ways
from remat import scan_remat
from remat.transforms._scan_blocks import Bound
from remat.transforms._scan_opaque import Entry

WIDTH = 16
LENGTHS = (10, 10_000)
WAYS = (
    "loop",
    "loop, each step again",
    "all",
    "all, everything saved",
    "all, compiled",
    "jax scan + checkpoint",
)


@dataclass
class ScanInCompile:
    """Compile time against length, and time a step."""

    backends: tuple[str, ...] = ("aot_eager", "inductor")
    """Backends to compile with."""
    repeats: int = 5
    """Compilations of each length."""
    steps: int = 4000
    """Steps of the scans whose time is taken; 0: none."""
    models: tuple[str, ...] = ("rnn", "gru")
    """Cells of benchmarks.scan_ways."""
    save: bool = True
    """Write results/scan_compile.csv."""

    def __call__(self) -> int:
        torch._inductor.config.force_disable_caches = True
        records, met = [], []
        for backend in self.backends:
            found = compile_seconds(backend, self.repeats)
            for n, seconds in found.items():
                records.append(
                    record(f"inside torch.compile, {backend}", f"{n} steps", "compile", "CPU s", seconds)
                )
            short, long = (statistics.median(found[n]) for n in LENGTHS)
            met.append(
                Target(f"{backend}: compile time of {LENGTHS[1]} steps over {LENGTHS[0]}", long / short, 1.1)
            )
        for model in self.models if self.steps else ():
            found = step_micros(model, self.steps)
            for way, micros in found.items():
                records.append(record(f"{model}, {self.steps} steps", way, "time a step", "us", micros))
            best = {way: min(micros) for way, micros in found.items()}
            loop = best["loop"]
            met += [
                Target(
                    f"{model}: all, everything saved, over the loop",
                    best["all, everything saved"] / loop,
                    1.15,
                ),
                Target(
                    f"{model}: all over a loop that evaluates each step again",
                    best["all"] / best[WAYS[1]],
                    1.15,
                ),
                Target(f"{model}: all, compiled, over the loop", best["all, compiled"] / loop, 1 / 3),
            ]
            if WAYS[-1] in best:
                met.append(
                    Target(f"{model}: all, compiled, over JAX", best["all, compiled"] / best[WAYS[-1]], 1.0)
                )
        show("Compiled scans", records, met)
        if self.save:
            print(save("scan_compile", records))
        return int(not all(target.met for target in met))


def record(mode: str, policy: str, metric: str, unit: str, values: list[float]) -> Record:
    ordered = sorted(values)
    p20, p80 = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8))
    return Record(
        "scan_compile", mode, policy, metric, unit, min(values), p20, statistics.median(values), p80
    )


def gradient(n: int, backend: str) -> Callable[[], object]:
    """A function that computes one compiled gradient of an RNN of `n` steps."""
    sizes = (WIDTH, WIDTH), (WIDTH,), (n, WIDTH)
    leaves = [torch.randn(size, requires_grad=True) for size in sizes]

    def loss(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        def body(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.tanh(h @ w + x)
            return h, h.sin()

        end, ys = scan_remat(body, h, xs, checkpoints="all")
        return end.sum() + ys.sum()

    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    return lambda: torch.autograd.grad(compiled(*leaves), leaves)


def compile_seconds(backend: str, repeats: int) -> dict[int, list[float]]:
    """CPU seconds to compile each length, `repeats` times in turns: the first gradient less running steps."""
    found: dict[int, list[float]] = {n: [] for n in LENGTHS}
    ran, made = spent_in(Entry, "forward", "pull"), spent_in(Bound, "_lookup")
    for turn in range(repeats + 1):
        for n in LENGTHS:
            torch._dynamo.reset()
            before = ran[0] - made[0]
            (first,) = timed(gradient(n, backend), 1)
            if turn:  # the first turn pays for what is loaded and built once
                found[n].append(first - (ran[0] - made[0] - before))
    return found


def spent_in(kind: type, *names: str) -> list[float]:
    """CPU seconds spent in methods of a class from now on, in a list of one."""
    total = [0.0]
    for name in names:
        method = getattr(kind, name)

        def timed(self: Any, *args: Any, method: Callable[..., Any] = method) -> Any:
            start = time.process_time()
            try:
                return method(self, *args)
            finally:
                total[0] += time.process_time() - start

        setattr(kind, name, timed)
    return total


def step_micros(model: str, n: int) -> dict[str, list[float]]:
    """CPU microseconds a step of whole gradients, ways in turns."""
    made, runs = ways(), {}
    for name in WAYS:
        if installed(name):
            runs[name] = made[name](cell(model), n)
            runs[name]()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(7):
        for name, run in runs.items():
            found[name] += [seconds / n * 1e6 for seconds in timed(run, 1)]
    return found


def timed(run: Callable[[], Any], times: int) -> list[float]:
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(tyro.cli(ScanInCompile)())
