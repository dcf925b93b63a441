"""Seconds of a call on a device, taken where no mode, level or autocast of the caller is in force."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from remat.transforms.compat import functions_as_they_are, outside_all_modes

# A call is repeated until this much time has passed, so that small ones are not all clock.
_SECONDS = 4e-4
_REPEATS = 5
# No further run after so much time: the least of two long ones will do.
_ENOUGH = 8e-2


def best_seconds(call: Callable[[], Any], device: str) -> float:
    """The least mean seconds of a few runs of `call`, after one warm-up.

    The least: what else the machine does only ever adds. What one thread of a CPU does is timed by the
    processor's clock, which does not go on while others have their turn. Several threads wait for the one
    that has no turn, up to a hundred times as long. So one thread is timed too, and they are said to take no
    longer.
    """
    taken = _least_seconds(call, device)
    if device.startswith("cpu") and torch.get_num_threads() > 1:
        with one_thread():
            taken = min(taken, _least_seconds(call, device))
    return taken


def _least_seconds(call: Callable[[], Any], device: str) -> float:
    wait, clock = synchronizer(device), clock_of(device)
    call()
    wait()
    times: list[float] = []
    begin = clock()
    while len(times) < _REPEATS and (len(times) < 2 or clock() - begin < _ENOUGH):
        count, start = 0, clock()
        while count == 0 or clock() - start < _SECONDS:
            call()
            count += 1
        wait()
        times.append((clock() - start) / count)
    return min(times)


def in_turns(calls: Sequence[Callable[[], Any]], device: str, rounds: int = 12) -> list[float]:
    """The median seconds of each call, after some warm-up.

    All take turns, another one first each time, so that drift of the machine meets all alike.
    """
    wait, clock = synchronizer(device), clock_of(device)
    taken: list[list[float]] = [[] for _ in calls]
    for turn in range(-3, rounds):
        first = turn % len(calls)
        for at in (*range(first, len(calls)), *range(first)):
            wait()
            start = clock()
            calls[at]()
            wait()
            taken[at] += [clock() - start] if turn >= 0 else []
    return [statistics.median(times) for times in taken]


def clock_of(device: str) -> Callable[[], float]:
    """The processor's clock for one thread of a CPU, else that on the wall."""
    one = device.startswith("cpu") and torch.get_num_threads() == 1
    return time.thread_time if one else time.perf_counter


def synchronizer(device: str) -> Callable[[], None]:
    """What waits for a device."""
    return (lambda: torch.cuda.synchronize(device)) if device.startswith("cuda") else lambda: None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A CPU's ops within run on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def alone(device: str) -> Iterator[None]:
    """Run what is timed as by itself, and leave the generators as they were."""
    kind = torch.device(device).type
    devices = [torch.device(device)] if kind == "cuda" else []
    with outside_all_modes(), functions_as_they_are(), torch.no_grad(), torch.autocast(kind, enabled=False):
        with torch.random.fork_rng(devices):
            yield
