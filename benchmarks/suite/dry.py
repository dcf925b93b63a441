"""`python -m benchmarks run --dry-run`: what each case would hold and compute, without running it.

Every model is built of fake tensors, in its full size, and one step of it in eager is followed: live bytes by
storage, FLOPs by torch's formulas. No device is asked for; attention is the CPU's fused kernel, which saves
what a GPU's does. Compiled steps hold less.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.measures import told
from benchmarks.common.models import drawn
from benchmarks.common.peers import peer
from benchmarks.common.steps import eager, make_step
from benchmarks.suite.cases import Case
from remat.cli.measure import Work
from remat.cli.steps import tensors, unmarked

GIB = 1 << 30
# For an H200's estimate: bfloat16 products of these sizes rarely run faster, and its memory less a reserve.
RATE, MEMORY = 500e12, 135 * GIB
# Turns of a peer before it is timed: the check, FLOPs or compilation, memory.
BEFORE = 3


class Live(TorchDispatchMode):
    """Follows the bytes of storages that are made under it, fake ones too, as they come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What an op is given, and nothing under this mode made, was there before.
        self.known.update(tensor.untyped_storage() for tensor in tensors((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(out):
            self.meet(tensor.untyped_storage())
        return out

    def meet(self, storage: torch.UntypedStorage) -> None:
        if storage in self.known:
            return
        self.known.add(storage)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self.leave, storage.nbytes())

    def leave(self, bytes: int) -> None:
        self.alive -= bytes


@dataclass(frozen=True)
class Estimate:
    """Of one case: bytes held throughout; beside them the peak of a step without remat, and of one that
    recomputes every block; FLOPs of the former.

    `error` says why there is none.
    """

    held: int = 0
    plain: int = 0
    lean: int = 0
    flops: int = 0
    error: str = ""

    def seconds(self, case: Case) -> float:
        """Of nothing but products, at `RATE`, with a third more for what is recomputed."""
        return len(case.peers) * (BEFORE + case.rounds) * self.flops * 4 / 3 / RATE


def estimate(case: Case) -> Estimate:
    """What the case would take; a peer that keeps all and one that keeps nothing stand for the others."""
    if case.kind == "records":
        return Estimate()
    try:
        with faked():
            return followed(case)
    except Exception as error:
        return Estimate(error=told(error))


@contextlib.contextmanager
def faked() -> Iterator[None]:
    """Fake tensors within, and none of them in the cache of weights before or after."""
    drawn.cache_clear()
    try:
        with FakeTensorMode():
            yield
    finally:
        drawn.cache_clear()


def followed(case: Case) -> Estimate:
    mode = "func" if case.mode == "step" else case.mode
    problem = case.built().problem(
        torch.device("cpu"), getattr(torch, case.dtype), case.seed, stacked=mode == "scan"
    )
    own = sum(t.numel() * t.element_size() for t in tensors(problem.params))
    # Parameters and the gradients that are compared with; JAX's copies of both.
    copies = 2 + (2 if any(name.startswith("jax") for name in case.peers) else 0)

    def step(name: str) -> Callable[[], Any]:
        run = make_step(mode, *problem.bind(peer(name).around), eager)
        return partial(run, problem.params, problem.batch, unmarked)

    def peak(name: str) -> int:
        with Live() as live:
            step(name)()
        return live.peak

    lean = "save_nothing" if mode in ("func", "vmap") else "torch checkpoint"
    with Work() as work:
        step("none")()
    return Estimate(copies * own, peak("none"), peak(lean), work.flops)


def show(parts: Sequence[Sequence[Case]], minutes: float) -> int:
    """Prints every case by part; 1 where a case without remat would not fit or a part takes too long."""
    console, wanting = Console(width=150), 0
    for number, cases in enumerate(parts, 1):
        table = Table(title=f"part {number} of {len(parts)}", title_justify="left")
        for head in ("case", "peers", "s expected", "s of products", "held GiB", "peak GiB", "all again"):
            table.add_column(head, justify="left" if head == "case" else "right", overflow="fold")
        for case in cases:
            found = estimate(case)
            wanting += case.kind != "fit" and found.held + found.plain > MEMORY
            table.add_row(case.name, str(len(case.peers)), f"{case.seconds:.0f}", *cells(case, found))
        console.print(table)
        total = sum(case.seconds for case in cases)
        wanting += total > 60 * minutes
        limit = "no limit" if math.isinf(minutes) else f"the runner stops at {60 * minutes:.0f} s"
        console.print(f"{total:.0f} s expected; {limit}\n", highlight=False)
    return int(bool(wanting))


def cells(case: Case, found: Estimate) -> tuple[str, ...]:
    if found.error or not found.flops:
        return (found.error[:40] or "-", "", "", "")
    sizes = (f"{size / GIB:.1f}" for size in (found.held, found.plain, found.lean))
    return (f"{found.seconds(case):.1f}", *sizes)
