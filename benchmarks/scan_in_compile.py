"""What a compiled scan costs: CPU seconds to compile it, short and long, and time a step against a loop.

    python -m benchmarks.scan_in_compile [--backend inductor] [--repeats 5]

Compiling is timed as the first gradient less what runs steps in it, in CPU seconds. Each time is taken in a
process of its own, with caches of its own and after a scan of another body has paid for what is loaded and
built once; C++ compilers that it calls are counted. Lengths take turns, so that drift of the machine meets
all alike, and medians are compared. Times a step are those of whole gradients of an RNN 64 wide, ways taking
turns.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config
import tyro

from benchmarks.common.records import Record, Target, save, show
from benchmarks.scan_memory import installed
from benchmarks.scan_ways import cell, ways
from remat import scan_remat
from remat.transforms.scan import function as the_function
from remat.transforms.scan.compiled.unroll import UnrolledStep
from remat.transforms.scan.traced import entry

WIDTH = 16
LENGTHS = (10, 10_000)
PLACES = "inside torch.compile", "compile=True"
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
    places: tuple[str, ...] = PLACES
    """Where scans are compiled."""
    repeats: int = 5
    """Compilations of each length."""
    steps: int = 4000
    """Steps of the scans whose time is taken; 0: none."""
    models: tuple[str, ...] = ("rnn", "gru")
    """Cells of benchmarks.scan_ways."""
    save: bool = True
    """Write results/scan_compile.csv; what it holds of other backends, places and cells stays."""

    def __call__(self) -> int:
        records, met = [], []
        for backend, place in itertools.product(self.backends if self.repeats else (), self.places):
            found = compile_seconds(backend, place, self.repeats)
            for n, seconds in found.items():
                records.append(record(f"{place}, {backend}", f"{n} steps", "compile", "CPU s", seconds))
            short, long = (statistics.median(found[n]) for n in LENGTHS)
            said = f"{place}, {backend}: compile time of {LENGTHS[1]} steps over {LENGTHS[0]}"
            met.append(Target(said, long / short, 1.1))
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
                Target(f"{model}: all, compiled, over the loop", best["all, compiled"] / loop, 0.8),
            ]
        show("Compiled scans", records, met)
        if self.save:
            print(save("scan_compile", records, beside=True))
        return int(not all(target.met for target in met))


def record(mode: str, policy: str, metric: str, unit: str, values: list[float]) -> Record:
    ordered = sorted(values)
    p20, p80 = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8))
    return Record(
        "scan_compile", mode, policy, metric, unit, min(values), p20, statistics.median(values), p80
    )


def gradient(n: int, backend: str, place: str, wave: Callable[..., Any]) -> Callable[[], object]:
    """A function that computes one compiled gradient of an RNN of `n` steps."""
    sizes = (WIDTH, WIDTH), (WIDTH,), (n, WIDTH)
    leaves = [torch.randn(size, requires_grad=True) for size in sizes]
    inside = place == PLACES[0]

    def loss(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        def body(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.tanh(h @ w + x)
            return h, wave(h)

        end, ys = scan_remat(body, h, xs, checkpoints="all", compile=False if inside else backend)
        return end.sum() + ys.sum()

    run: Any = torch.compile(loss, backend=backend, fullgraph=True) if inside else loss
    return lambda: torch.autograd.grad(run(*leaves), leaves)


def compile_seconds(backend: str, place: str, repeats: int) -> dict[int, list[float]]:
    """CPU seconds to compile each length, `repeats` times in turns."""
    found: dict[int, list[float]] = {n: [] for n in LENGTHS}
    for _ in range(repeats):
        for n in LENGTHS:
            command = [sys.executable, "-m", "benchmarks.scan_in_compile", "--one", backend, place, str(n)]
            with tempfile.TemporaryDirectory() as caches:
                told = subprocess.run(
                    command,
                    env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches},
                    capture_output=True,
                    text=True,
                    check=True,
                )
            found[n].append(float(told.stdout.splitlines()[-1]))
    return found


def one(backend: str, place: str, n: int) -> None:
    """Time one compilation in this process, and print it."""
    torch._inductor.config.compile_threads = 1
    # What both places run their steps in, and what compiles within.
    ran, made = spent_in(entry, "sweep", "pull_back"), spent_in(UnrolledStep, "_lookup")
    ran_in_eager = spent_in(the_function, "sweep", "pull_back")
    # Of a length that is neither: kernels around the scan are another's for every length, and new for both.
    gradient(26, backend, place, torch.cos)()

    def running() -> float:
        return ran[0] + ran_in_eager[0] - made[0]

    before, run = running(), gradient(n, backend, place, torch.sin)
    start = cpu_seconds()
    run()
    print(cpu_seconds() - start - (running() - before))


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def spent_in(kind: Any, *names: str) -> list[float]:
    """CPU seconds spent in functions of a class or module from now on, in a list of one."""
    total = [0.0]
    for name in names:
        function = getattr(kind, name)

        def timed(*args: Any, function: Callable[..., Any] = function) -> Any:
            start = cpu_seconds()
            try:
                return function(*args)
            finally:
                total[0] += cpu_seconds() - start

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
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        raise SystemExit
    raise SystemExit(tyro.cli(ScanInCompile)())
