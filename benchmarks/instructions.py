"""Instructions of a region in eager mode: 12 tiny transformer blocks (16 wide), forward and backward.

    python -m benchmarks.instructions      # needs valgrind and a C compiler; two minutes

Counted by callgrind: unlike times, counts are the same on a busy machine, and nearly the same on another one.
At this size they are bookkeeping and dispatch, not arithmetic. A row is counted over a step of its own after
a dozen that warm up, and no remat is taken off.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from benchmarks.common.records import Record, Target, conclude, ratio
from benchmarks.overhead import MODE, Overhead
from remat.cli.rows import Row, row

PLAN = "budget=free"
METRIC = "instructions per block over no remat"
WORKER = "--worker"
# Requests to valgrind are macros of its header, so two lines of C are compiled.
SWITCHES = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void stop(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""


@dataclass
class Instructions:
    """Thousands of instructions per block over no remat."""

    depth: int = 12
    """Blocks."""
    width: int = 16
    """Width of a block."""
    save: bool = True
    """Write results/instructions.csv."""

    def __call__(self) -> int:
        records = self.run()
        title = f"{self.depth} transformer blocks, {self.width} wide"
        return conclude("instructions", title, records, targets(records), self.save)

    def run(self) -> list[Record]:
        counts = self.counted()
        return [
            Record("instructions", MODE, name, METRIC, "thousands", (count - counts["none"]) / 1e3)
            for name, count in counts.items()
        ]

    def counted(self) -> dict[str, float]:
        """Instructions of a step per block, by row: this file in a process of its own, under callgrind."""
        with tempfile.TemporaryDirectory() as folder:
            switches = compiled(Path(folder))
            tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
            tool += [f"--callgrind-out-file={folder}/out"]
            worker = [sys.executable, "-m", "benchmarks.instructions", WORKER]
            given = [str(switches), str(self.depth), str(self.width)]
            fixed = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
            subprocess.run([*tool, *worker, *given], check=True, env=fixed, stderr=subprocess.DEVNULL)
            names = [row.name for row in self.overhead().rows()]
            found = [total(Path(folder, f"out.{number}")) for number in range(1, len(names) + 1)]
        return {name: count / self.depth for name, count in zip(names, found, strict=True)}

    def overhead(self) -> Overhead:
        return WithPlan(depth=self.depth, width=self.width)


class WithPlan(Overhead):
    """With a plan that, as `save_matmuls`, runs no matmul again."""

    def rows(self) -> list[Row]:
        return [*super().rows(), row(PLAN)]


def compiled(folder: Path) -> Path:
    """The switches as a library that Python can call."""
    source, library = folder / "switches.c", folder / "switches.so"
    source.write_text(SWITCHES)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def total(path: Path) -> int:
    """What a dump of callgrind counted."""
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("totals:"))


def worker(library: str, overhead: Overhead) -> None:
    """Runs under callgrind: a dump for each row, in their order."""
    torch.set_num_threads(1)
    valgrind = ctypes.CDLL(library)
    steps: list[Callable[[], None]] = [overhead.step(row) for row in overhead.rows()]
    for step in steps:
        for _ in range(12):
            step()
    # A collection would count for the row that it falls on.
    gc.collect()
    gc.disable()
    for step in steps:
        step()
        valgrind.start()
        step()
        valgrind.stop()


def targets(records: list[Record]) -> list[Target]:
    pairs = [
        ("save_nothing", "torch_checkpoint", 0.9),
        ("save_matmuls", "torch_sac", 0.45),
        (row(PLAN).name, "save_matmuls", 1.1),
    ]
    return [
        Target(f"{ours} over {theirs}", ratio(records, MODE, ours, theirs), limit)
        for ours, theirs, limit in pairs
    ]


if __name__ == "__main__":
    if WORKER in sys.argv:
        library, depth, width = sys.argv[2:]
        worker(library, WithPlan(depth=int(depth), width=int(width)))
    else:
        raise SystemExit(tyro.cli(Instructions)())
