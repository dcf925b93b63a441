"""CPU overhead of a region in eager mode: 24 tiny transformer blocks (16 wide), forward and backward.

    python -m benchmarks.overhead

At this size the time is bookkeeping and dispatch, not arithmetic. All rows take turns in every round, and a
row's overhead is its time less that of no remat in the same round, per block; medians over the rounds of
several fresh processes (where memory happens to lie moves a row by several percent for as long as a process
lives). A turn is a few steps after one that warms up, as in training, where a step follows one of its own
kind; or alternating, one step, which finds the processor's caches full of another row's. Time is the
process's CPU time: what other processes take of the machine does not count.

Beside the blocks as modules there are `KINDS`: other ways to write and to call them.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from benchmarks.common.records import Record, Target, conclude, ratio
from remat.cli.measure import percentiles
from remat.cli.rows import Row, parse, row, rows
from remat.nn import apply

MODE, ALTERNATING, OVER, BUDGET = "backward", "alternating", "overhead per block", "budget=0.5"
T = TypeVar("T")
K = TypeVar("K")
Taken = dict[tuple[str, ...], float]


# How blocks are written or called, but for modules alone: one function and a dict of parameters for each
# block, a model by `remat.nn.apply`, dropout, a batch norm, writes in place, another length in every step.
KINDS = ("functions", "nn.apply", "dropout", "batch norm", "in place", "lengths")
# Lengths come again after so many steps. Steps that warm up (a budget looks at three calls of a length).
LENGTHS = 6
WARM = 8, 4 * LENGTHS


class Block(nn.Module):
    """Pre-norm attention and a GELU network; x is [batch, t, width]."""

    def __init__(self, width: int, heads: int, kind: str = "modules") -> None:
        super().__init__()
        self.heads, self.in_place = heads, kind == "in place"
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        if kind == "batch norm":
            self.norm2 = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(width), nn.Unflatten(0, (2, -1)))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropped = partial(F.dropout, p=0.1) if kind == "dropout" else None

    def forward(self, x: Tensor) -> Tensor:
        # Plain views: a peer that runs Python again would pay for einops twice.
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        h = self.up(self.norm2(x))
        h = F.relu(h, inplace=True) if self.in_place else F.gelu(h)
        h = self.down(h if self.dropped is None else self.dropped(h))
        return h.add_(x) if self.in_place else x + h


def function_block(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Pre-norm attention of one head and a GELU network; x is [..., t, width]."""
    width = x.shape[-1]
    h = F.layer_norm(x, (width,), params["norm1"], params["bias1"])
    q, k, v = F.linear(h, params["qkv"]).chunk(3, -1)
    attended = torch.softmax(q @ k.transpose(-1, -2) / width**0.5, -1) @ v
    x = x + F.linear(attended, params["proj"])
    h = F.layer_norm(x, (width,), params["norm2"], params["bias2"])
    return x + F.linear(F.gelu(F.linear(h, params["up"])), params["down"])


def parameters(depth: int, width: int) -> list[dict[str, Tensor]]:
    """The parameters of `function_block`, for each of `depth` blocks."""
    torch.manual_seed(0)
    w = width
    shapes = {"qkv": (3 * w, w), "proj": (w, w), "up": (4 * w, w), "down": (w, 4 * w)}
    norms = {"norm1": torch.ones, "bias1": torch.zeros, "norm2": torch.ones, "bias2": torch.zeros}
    made = {name: fill(w) for name, fill in norms.items()}
    return [{**made, **{k: 0.1 * torch.randn(s) for k, s in shapes.items()}} for _ in range(depth)]


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
    kinds: tuple[str, ...] = KINDS
    """Other ways to write and to call blocks."""
    save: bool = True
    """Write results/overhead.csv."""

    def __call__(self) -> int:
        records = self.run()
        title = f"{self.depth} transformer blocks, {self.width} wide: us per block"
        return conclude("overhead", title, records, targets(records), self.save)

    def run(self) -> list[Record]:
        rounds = [taken for found in in_processes(self.measure, self.processes) for taken in found]
        return [record for kind, row in self.rows() for record in self.records(kind, row.name, rounds)]

    def measure(self) -> list[Taken]:
        """The rounds of one process: CPU seconds of a step of each row, in both kinds of turns."""
        torch.set_num_threads(1)
        rounds = [Taken() for _ in range(self.rounds)]
        for kind in (MODE, *self.kinds):
            steps: dict[tuple[str, ...], Callable[[], None]] = {
                (kind, row.name): self.step(kind, row) for of, row in self.rows() if of == kind
            }
            times(steps, WARM[kind == "lengths"])
            for taken in rounds:
                taken.update(times(steps, self.steps))
                taken.update(
                    {(*at, ALTERNATING): took for at, took in alternating(steps, self.steps).items()}
                )
        return rounds

    def rows(self) -> list[tuple[str, Row]]:
        """Each with what blocks it runs."""
        named = rows(("none", "torch_checkpoint", "torch_sac", "save_nothing", "save_matmuls"))
        few = [*named[:2], *named[3:], row(BUDGET)]
        return [
            *[(MODE, r) for r in (*named[:3], PEER, *few[2:])],
            *[(k, r) for k in self.kinds for r in few],
        ]

    def step(self, kind: str, row: Row) -> Callable[[], None]:
        """Forward and backward through blocks of its own, wrapped once as a model would."""
        lengths = itertools.cycle(range(8, 8 + LENGTHS) if kind == "lengths" else (8,))
        call = self.model(kind, row)

        def run() -> None:
            x = torch.randn(2, next(lengths), self.width, requires_grad=True)
            call(x).sum().backward()

        return run

    def model(self, kind: str, row: Row) -> Callable[[Tensor], Tensor]:
        if kind == "functions":
            wrapped = row.wrap(function_block)
            params = [
                {k: v.requires_grad_() for k, v in p.items()} for p in parameters(self.depth, self.width)
            ]
            return in_turn([partial(wrapped, own) for own in params])
        torch.manual_seed(0)
        blocks = [Block(self.width, 2, kind) for _ in range(self.depth)]
        if kind != "nn.apply" or row.rival:
            return in_turn([row.wrap(block) for block in blocks])
        model = nn.Sequential(*blocks)
        return model if row.name == "none" else apply(model, layers="*", policy=parse(row.name))

    def records(self, kind: str, name: str, rounds: list[Taken]) -> list[Record]:
        per_block, found = 1e6 / self.depth, []
        for turns, said in (((), ""), ((ALTERNATING,), f", {ALTERNATING}")):
            took = [r[kind, name, *turns] * per_block for r in rounds]
            over = [t - r[kind, "none", *turns] * per_block for t, r in zip(took, rounds, strict=True)]
            for metric, each in ((f"CPU time per block{said}", took), (OVER + said, over)):
                p20, p50, p80 = percentiles(each)
                found.append(Record("overhead", kind, name, metric, "us", p50, p20, p50, p80))
        return found


def in_turn(blocks: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    """One after the other."""

    def model(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    return model


def in_processes(measure: Callable[[], T], count: int) -> list[T]:
    """What `measure` finds in so many fresh processes, one after another."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, fresh, max_tasks_per_child=1) as pool:
        runs = [pool.submit(measure) for _ in range(count)]
        return [run.result() for run in runs]


def times(steps: dict[K, Callable[[], Any]], count: int) -> dict[K, float]:
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


def alternating(steps: dict[K, Callable[[], Any]], count: int) -> dict[K, float]:
    """The same, where each step follows one of another row."""
    taken = dict.fromkeys(steps, 0.0)
    gc.collect()
    for _ in range(count):
        for name, step in steps.items():
            start = time.process_time()
            step()
            taken[name] += (time.process_time() - start) / count
    return taken


def targets(records: list[Record]) -> list[Target]:
    """What is claimed; the limits are part of the claim."""
    found = []
    for turns, limit in (("", 0.9), (f", {ALTERNATING}", 1.1)):
        over = [record for record in records if record.metric == OVER + turns]
        pairs = [(MODE, "save_nothing", "torch_checkpoint", limit)]
        if not turns:
            pairs += [(MODE, "save_nothing", PEER.name, 0.9), (MODE, "save_matmuls", "torch_sac", 0.45)]
            pairs += [("nn.apply", "save_nothing", "torch_checkpoint", 1.05)]
            plans = ("save_matmuls", row(BUDGET).name)
            pairs += [(kind, name, "save_nothing", 1.15) for kind in (MODE, *KINDS) for name in plans]
        found += [
            Target(
                f"{kind}{turns}: overhead of {ours} over that of {theirs}",
                ratio(over, kind, ours, theirs),
                at,
            )
            for kind, ours, theirs, at in pairs
        ]
    return found


if __name__ == "__main__":
    raise SystemExit(tyro.cli(Overhead)())
