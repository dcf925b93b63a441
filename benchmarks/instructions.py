"""Instructions of a region in eager mode: 12 tiny transformer blocks (16 wide), forward and backward.

    python -m benchmarks.instructions      # needs valgrind and a C compiler; eight minutes

Counted by callgrind: unlike times, counts are the same on a busy machine, and nearly the same on another one.
At this size they are bookkeeping and dispatch, not arithmetic. A row is counted over a step of its own after
those that warm up, and no remat is taken off.
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
from benchmarks.overhead import BUDGET, KINDS, MODE, WARM, Overhead
from remat.cli.rows import row

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
            Record("instructions", kind, name, METRIC, "thousands", (count - counts[kind, "none"]) / 1e3)
            for (kind, name), count in counts.items()
        ]

    def counted(self) -> dict[tuple[str, str], float]:
        """Instructions of a step per block, by kind and row: a process of its own, under callgrind."""
        with tempfile.TemporaryDirectory() as folder:
            switches = compiled(Path(folder))
            tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
            tool += [f"--callgrind-out-file={folder}/out"]
            worker = [sys.executable, "-m", "benchmarks.instructions", WORKER]
            given = [str(switches), str(self.depth), str(self.width)]
            fixed = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
            subprocess.run([*tool, *worker, *given], check=True, env=fixed, stderr=subprocess.DEVNULL)
            names = [(kind, row.name) for kind, row in Overhead().rows()]
            found = [total(Path(folder, f"out.{number}")) for number in range(1, len(names) + 1)]
        return {name: count / self.depth for name, count in zip(names, found, strict=True)}


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
    steps: list[Callable[[], None]] = []
    for kind, one in overhead.rows():
        steps.append(overhead.step(kind, one))
        for _ in range(WARM[kind == "lengths"]):
            steps[-1]()
    # A collection would count for the row that it falls on.
    gc.collect()
    gc.disable()
    for step in steps:
        step()
        valgrind.start()
        step()
        valgrind.stop()


def targets(records: list[Record]) -> list[Target]:
    plans = ("save_matmuls", row(BUDGET).name)
    pairs = [
        (MODE, "save_nothing", "torch_checkpoint", 0.9),
        (MODE, "save_matmuls", "torch_sac", 0.45),
        ("nn.apply", "save_nothing", "torch_checkpoint", 1.05),
        *[(kind, name, "save_nothing", 1.15) for kind in (MODE, *KINDS) for name in plans],
    ]
    return [
        Target(f"{kind}: {ours} over {theirs}", ratio(records, kind, ours, theirs), limit)
        for kind, ours, theirs, limit in pairs
    ]


if __name__ == "__main__":
    if WORKER in sys.argv:
        library, depth, width = sys.argv[2:]
        worker(library, Overhead(depth=int(depth), width=int(width)))
    else:
        raise SystemExit(tyro.cli(Instructions)())
