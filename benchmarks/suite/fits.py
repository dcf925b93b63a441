"""The largest batch, or the longest sequence, whose step stays within so many bytes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.common.measures import NEVER, Deadline, clock_of, interleaved, recover, told
from benchmarks.common.peers import Peer, peer
from benchmarks.common.steps import eager, make_step
from benchmarks.suite.cases import NO_TIME, Case, Measured
from benchmarks.suite.panel import compiled_step, problem_of
from remat.cli.measure import percentiles, trace_memory
from remat.cli.steps import unmarked

# A size that is tried: its peak in bytes, None where memory ran out.
Peak = Callable[[int], int | None]


def largest(peak: Peak, limit: int, start: int = 1) -> tuple[int, int]:
    """The largest n with `peak(n) <= limit`, 0 for none, and how many sizes were tried.

    `peak` grows with n, about as a line: each guess lies where the line through the last two peaks meets the
    limit, between the largest n that fits and the smallest that does not.
    """
    seen: list[tuple[int, int]] = []
    low, high, guess, tried = 0, 0, start, 0
    while True:
        used = peak(guess)
        tried += 1
        if used is not None:
            seen = [*seen, (guess, used)][-2:]
        if used is not None and used <= limit:
            low = guess
        else:
            high = guess
        if high and high - low <= 1:
            return low, tried
        guess = next_guess(seen, limit, low, high)


def next_guess(seen: list[tuple[int, int]], limit: int, low: int, high: int) -> int:
    guess = 2 * low if not high else (low + high) // 2
    if len(seen) == 2 and seen[1][1] != seen[0][1]:
        (a, used), (b, more) = seen
        guess = int(b + (limit - more) * (b - a) / (more - used))
        # Without a bound above, a guess far off would cost a run that is far too large.
        # With one that the line does not know of (no memory was left there), it does not say what lies below.
        guess = ((low + high) // 2 if guess >= high else guess) if high else min(guess, 8 * low)
    return max(low + 1, min(guess, high - 1) if high else guess)


def fits(case: Case, deadline: Deadline = NEVER) -> Iterator[Measured]:
    """For every peer the largest size, and the samples a second at it."""
    slowest = 0.0
    for name in case.peers:
        one = peer(name)
        row = dataclasses.replace(Measured.of(case), peer=name, family=one.family)
        if not deadline.allows_another(slowest):
            yield row.failed(NO_TIME)
            continue
        start = time.monotonic()
        try:
            count, _ = largest(lambda n, one=one: peak(sized(case, n), one), case.limit)
            yield row.with_value(f"largest {case.vary}", "", count * case.step)
            if count and case.rounds:
                yield throughput(sized(case, count), one, row)
        except Exception as error:
            yield row.failed(told(error))
            recover(error)
        slowest = max(slowest, time.monotonic() - start)


def sized(case: Case, count: int) -> Case:
    sizes = dict(case.sizes) | {case.vary: count * case.step}
    return dataclasses.replace(case, sizes=tuple(sizes.items()))


def step_of(case: Case, one: Peer) -> Callable[..., object]:
    problem = problem_of(case)
    step = (
        compiled_step(case, problem, one)
        if case.compiled
        else make_step(case.mode, *problem.bind(one.around), eager)
    )

    def run(mark: Callable[[], None]) -> None:
        # Gradients are dropped at once: they are part of the step's peak all the same.
        step(problem.params, problem.batch, mark)

    return run


def peak(case: Case, one: Peer) -> int | None:
    """Bytes of one step; None where the device's memory ends first."""
    try:
        return trace_memory(step_of(case, one), case.device).peak
    except torch.OutOfMemoryError:
        return None
    finally:
        recover()


def throughput(case: Case, one: Peer, row: Measured) -> Measured:
    run = step_of(case, one)
    run(unmarked)
    clock = clock_of(case.device, case.clock)
    taken, failed = interleaved({one.name: lambda: run(unmarked)}, case.rounds, clock)
    if failed:
        return row.failed(failed[one.name])
    times = percentiles(taken[one.name])
    amount = dict(case.sizes)[case.vary]
    low, middle, high = (1e3 * amount / t for t in reversed(times))
    return row.with_spread(f"{case.vary} a second", "1/s", (low, middle, high))
