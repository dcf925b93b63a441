"""Bytes, ops, FLOPs and seconds of one step."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from remat._core import OpInfo, describe
from remat.transforms.compat import TorchDispatchMode

T = TypeVar("T")
Mark = Callable[[], None]
MARK = "remat: forward ends"


@dataclass(frozen=True)
class Memory(Generic[T]):
    """Bytes of one step, counted from what was allocated before it.

    Attributes:
        result: what the step returned.
        kept: bytes alive at the mark, that is between forward and backward (0 if no mark was set).
        peak: the highest number of bytes alive at once.
    """

    result: T
    kept: int
    peak: int


def trace_memory(step: Callable[[Mark], T], device: torch.device | str = "cpu") -> Memory[T]:
    """Runs `step(mark)` once and follows its allocations; the step calls `mark()` where its forward ends.

    On a CPU every allocation is read from the profiler's memory events, on CUDA from the caching
    allocator. What a function still holds in local variables at the mark counts as kept, as it should.

    Example:
        >>> from remat.cli.measure import trace_memory
        >>> trace_memory(lambda mark: (torch.ones(1024) + 1, mark())[0]).peak >> 10
        8
    """
    # What an earlier step left in cycles must not go, and be counted as freed, in the middle of this one.
    gc.collect()
    return _trace_cuda(step) if torch.device(device).type == "cuda" else _trace_cpu(step)


def _trace_cpu(step: Callable[[Mark], T]) -> Memory[T]:
    # Torch 2.13's profiler writes a line to stderr at each start and stop unless told to be quiet.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile, record_function

    def mark() -> None:
        with record_function(MARK):
            pass

    # Without acc_events 2.11 warns that it keeps the events of one cycle, and there is one.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        result = step(mark)
    assert prof.profiler is not None and prof.profiler.kineto_results is not None
    kept = peak = alive = 0
    events: list[Any] = prof.profiler.kineto_results.events()
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
        elif event.name() == MARK:
            kept = alive
    return Memory(result, kept, peak)


def _trace_cuda(step: Callable[[Mark], T]) -> Memory[T]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = 0

    def mark() -> None:
        nonlocal kept
        kept = torch.cuda.memory_allocated() - before

    result = step(mark)
    torch.cuda.synchronize()
    return Memory(result, kept, torch.cuda.max_memory_allocated() - before)


# Ops that move no number: counting them would call a step's bookkeeping a recomputation.
BOOKKEEPING = {
    "detach",
    "alias",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
}


class Work(TorchDispatchMode):
    """A dispatch mode that counts the aten ops run under it (views and bookkeeping aside) and their FLOPs.

    Example:
        >>> from remat.cli.measure import Work
        >>> with Work() as work:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> work.ops["mm"], work.flops
        (1, 48)
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "overloadpacket", func).__name__
        if not getattr(func, "is_view", False) and name not in BOOKKEEPING:
            self.ops[name] += 1
            outs = out if isinstance(out, (tuple, list)) else (out,)
            self.flops += OpInfo(func, describe(args), describe(kwargs), describe(tuple(outs))).flops
        return out

    def beyond(self, other: Work) -> tuple[int, int]:
        """Ops and FLOPs that this step ran and `other` did not."""
        return (self.ops - other.ops).total(), self.flops - other.flops


def seconds(step: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, float]:
    """`step()` and the wall-clock seconds it took, with CUDA's queue drained before and after."""
    drain = torch.cuda.synchronize if torch.device(device).type == "cuda" else (lambda: None)
    drain()
    start = time.perf_counter()
    result = step()
    drain()
    return result, time.perf_counter() - start


def percentiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile of `samples`, by linear interpolation.

    Example:
        >>> from remat.cli.measure import percentiles
        >>> percentiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        (2.0, 3.5, 5.0)
    """
    ordered = torch.tensor(sorted(samples), dtype=torch.float64)
    p20, p50, p80 = torch.quantile(ordered, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return p20, p50, p80
