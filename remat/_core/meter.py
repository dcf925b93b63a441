"""The bytes of one step: those alive at once, and those alive between its forward and its backward."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

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
        >>> from remat._core import trace_memory
        >>> trace_memory(lambda mark: (torch.ones(1024) + 1, mark())[0]).peak >> 10
        8
    """
    # What an earlier step left in cycles must not go, and be counted as freed, in the middle of this one.
    gc.collect()
    return _trace_cuda(step) if torch.device(device).type == "cuda" else trace_cpu(step)


def trace_cpu(step: Callable[[Mark], T]) -> Memory[T]:
    """The same on a CPU, where no cycle is in the way."""
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
    events: list[Any] = [*prof.profiler.kineto_results.experimental_event_tree()]
    for event in events:
        events += event.children
    # What was there before may go meanwhile, such as a result that a module holds: it is no part of this.
    sizes: dict[int, int] = {}
    for event in sorted(events, key=lambda e: e.start_time_ns):
        size = getattr(event.extra_fields, "alloc_size", 0)
        if size > 0:
            sizes[event.extra_fields.ptr] = size
            alive += size
            peak = max(peak, alive)
        elif size:
            alive -= sizes.pop(event.extra_fields.ptr, 0)
        elif event.name == MARK:
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
