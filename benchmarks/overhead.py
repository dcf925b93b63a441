"""CPU overhead of a region in eager mode: 24 tiny transformer blocks (16 wide), forward and backward.

    python -m benchmarks.overhead

At this size the time is bookkeeping and dispatch, not arithmetic. All rows take turns in every round, and a
row's overhead is its time less that of no remat in the same round, per block; medians over the rounds of
several fresh processes (where memory happens to lie moves a row by several percent for as long as a process
lives). A turn is a few steps after one that warms up, as in training, where a step follows one of its own
kind. Time is the process's CPU time: what other processes take of the machine does not count.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from benchmarks.common.records import Record, Target, conclude, ratio
from remat.cli.measure import percentiles
from remat.cli.rows import Row, rows

MODE = "backward"
T = TypeVar("T")


class Block(nn.Module):
    """Pre-norm attention and a GELU network; x is [batch, t, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        # Plain views: a peer that runs Python again would pay for einops twice.
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def torch_remat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Meta's package, which recomputes a whole block unless told otherwise."""
    import torch_remat as peer

    return peer.checkpoint(region_name="block")(fn)


PEER = Row("torch_remat", torch_remat, rival=True)


@dataclass
class Overhead:
    """Microseconds per block over no remat."""

    depth: int = 24
    """Blocks."""
    width: int = 16
    """Width of a block."""
    processes: int = 5
    """Processes, one after another."""
    rounds: int = 10
    """Interleaved rounds in a process, after the warm-up."""
    steps: int = 3
    """Steps of a turn that count."""
    save: bool = True
    """Write results/overhead.csv."""

    def __call__(self) -> int:
        records = self.run()
        title = f"{self.depth} transformer blocks, {self.width} wide: us per block"
        return conclude("overhead", title, records, targets(records), self.save)

    def run(self) -> list[Record]:
        rounds = [taken for found in in_processes(self.measure, self.processes) for taken in found]
        return [record for row in self.rows() for record in self.records(row.name, rounds)]

    def measure(self) -> list[dict[str, float]]:
        """The rounds of one process: CPU seconds of a step of each row."""
        torch.set_num_threads(1)
        steps = {row.name: self.step(row) for row in self.rows()}
        for _ in range(3):
            times(steps, self.steps)
        return [times(steps, self.steps) for _ in range(self.rounds)]

    def rows(self) -> list[Row]:
        named = rows(("none", "torch_checkpoint", "torch_sac", "save_nothing", "save_matmuls"))
        return [*named[:3], PEER, *named[3:]]

    def step(self, row: Row) -> Callable[[], None]:
        """Forward and backward through blocks of its own, wrapped once as a model would."""
        wrapped = [row.wrap(block) for block in self.blocks()]
        x = torch.randn(2, 8, self.width, requires_grad=True)

        def run() -> None:
            h = x
            for block in wrapped:
                h = block(h)
            h.sum().backward()

        return run

    def blocks(self) -> list[Block]:
        torch.manual_seed(0)
        return [Block(self.width, heads=2) for _ in range(self.depth)]

    def records(self, name: str, rounds: list[dict[str, float]]) -> list[Record]:
        per_block = 1e6 / self.depth
        took = percentiles([r[name] * per_block for r in rounds])
        over = percentiles([(r[name] - r["none"]) * per_block for r in rounds])
        return [
            Record("overhead", MODE, name, metric, "us", p50, p20, p50, p80)
            for metric, (p20, p50, p80) in (("CPU time per block", took), ("overhead per block", over))
        ]


def in_processes(measure: Callable[[], T], count: int) -> list[T]:
    """What `measure` finds in so many fresh processes, one after another."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, fresh, max_tasks_per_child=1) as pool:
        runs = [pool.submit(measure) for _ in range(count)]
        return [run.result() for run in runs]


def times(steps: dict[str, Callable[[], None]], count: int) -> dict[str, float]:
    """CPU seconds of a step of each row, in turn; garbage of one row is its own to collect."""
    taken = {}
    for name, step in steps.items():
        gc.collect()
        step()
        start = time.process_time()
        for _ in range(count):
            step()
        taken[name] = (time.process_time() - start) / count
    return taken


def targets(records: list[Record]) -> list[Target]:
    """What issue 14 asks for, where every op is watched; the limits are part of the claim.

    (Issue 2 asked for 0.6, 0.6 and 0.7, of a way that watched none.)
    """
    over = [record for record in records if record.metric == "overhead per block"]
    pairs = [
        ("save_nothing", "torch_checkpoint", 0.9),
        ("save_nothing", "torch_remat", 0.9),
        ("save_matmuls", "torch_sac", 0.45),
    ]
    return [
        Target(f"overhead of {ours} over that of {theirs}", ratio(over, MODE, ours, theirs), limit)
        for ours, theirs, limit in pairs
    ]


if __name__ == "__main__":
    raise SystemExit(tyro.cli(Overhead)())
