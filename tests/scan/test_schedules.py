"""Schedules are integers: their counts are checked against formulas, a dynamic program and equinox."""

from __future__ import annotations

import doctest
import sys
from functools import cache

import pytest
from hypothesis import given, settings, strategies as st

from remat.schedules import (
    All,
    Multilevel,
    Online,
    Revolve,
    Segmented,
    Sqrt,
    advances,
    as_schedule,
    auto,
    beta,
)
from tests.scan.inside import Advance, Reverse


@cache
def optimum(n: int, c: int) -> int:
    """Least advances by dynamic programming over the place of the next store."""
    if n == 1:
        return 0
    if c == 1:
        return n * (n - 1) // 2
    return min(m + optimum(n - m, c - 1) + optimum(m, c) for m in range(1, n))


@cache
def least(n: int, c: int) -> int:
    """Least steps recomputed when the forward runs all steps and keeps `c` states, the first one counted."""
    if c == 1:
        return n * (n - 1) // 2
    return min([optimum(n, c), *(least(n - m, c - 1) + optimum(m, c) for m in range(1, n))])


@pytest.mark.parametrize("c", [1, 2, 3, 5, 8, 12])
def test_revolve_makes_exactly_the_optimal_number_of_advances(c):
    for n in range(1, 131):
        assert advances(n, c) == optimum(n, c)
        stats = Revolve(c).stats(n)
        assert stats.recomputed == least(n, c) == optimum(n + 1, c) - n
        assert stats.slots == len(Revolve(c).forward(n)) == min(c, n)
        assert stats.taped == n and stats.tape == 1
        assert stats.evaluations == 2 * n + stats.recomputed == n + stats.advances


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 60))
def test_revolve_beyond_the_table(n, c):
    stats = Revolve(c).stats(n)
    assert stats.advances == advances(n + 1, c) and stats.slots == min(c, n)


@pytest.mark.parametrize("c", range(1, 13))
def test_online_equals_offline_in_its_range(c):
    for n in range(1, (c + 1) * (c + 2) // 2):
        assert Online(c).stats(n).advances == advances(n + 1, c)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 600), st.integers(1, 12))
def test_online_beyond_its_range_is_valid_and_not_better_than_the_optimum(n, c):
    stats = Online(c).stats(n)
    assert stats.advances >= advances(n + 1, c) and stats.slots <= c and stats.taped == n


# tests/test_while_loop.py of equinox (Apache-2.0), there called test_backward_checkpointed: checkpoints,
# steps and the steps evaluated in the backward pass.
GOLDEN = [
    (1, 3, "0,1,2,0,1,0"),
    (1, 5, "0,1,2,3,4,0,1,2,3,0,1,2,0,1,0"),
    (2, 8, "7,0,1,2,3,4,5,6,3,4,5,3,4,3,0,1,2,1,0"),
    (3, 11, "10,4,5,6,7,8,9,7,8,7,4,5,6,5,4,0,1,2,3,2,1,0"),
    (9, 5, "4,3,2,1,0"),
    (2, 5, "3,4,3,0,1,2,1,0"),
    (4, 4, "3,2,1,0"),
    (4, 5, "3,4,3,2,1,0"),
    (4, 6, "5,2,3,4,3,2,1,0"),
    (4, 7, "6,5,2,3,4,3,2,0,1,0"),
    (4, 8, "7,6,5,0,1,2,3,4,3,2,1,0"),
    (4, 9, "7,8,7,6,5,0,1,2,3,4,3,2,1,0"),
    (4, 10, "9,6,7,8,7,6,5,0,1,2,3,4,3,2,1,0"),
    (4, 11, "10,9,5,6,7,8,7,6,5,0,1,2,3,4,3,2,1,0"),
    (4, 12, "10,11,10,9,5,6,7,8,7,6,5,0,1,2,3,4,3,2,1,0"),
    (4, 13, "12,9,10,11,10,9,5,6,7,8,7,6,5,0,1,2,3,4,3,2,1,0"),
    (4, 14, "12,13,12,9,10,11,10,9,5,6,7,8,7,6,5,0,1,2,3,4,3,2,1,0"),
]


@pytest.mark.parametrize("c, n, golden", GOLDEN)
def test_online_reproduces_equinox(c, n, golden):
    schedule = Online(c)
    actions = schedule.actions(n, schedule.forward(n))
    steps = [k for a in actions if isinstance(a, Advance | Reverse) for k in range(a.start, a.stop)]
    assert ",".join(map(str, steps)) == golden


@pytest.mark.parametrize("n", [1, 2, 3, 4, 10, 17, 100, 1001])
def test_fixed_schedules(n):
    every = All().stats(n)
    assert (every.recomputed, every.slots, every.taped) == (0, n, n)
    two = Sqrt().stats(n)
    assert two.slots <= 2 * n**0.5 + 1 and two.recomputed < n and two.taped == n
    both = Multilevel(device=2, host=3)
    assert both.stats(n) == Revolve(5).stats(n)
    assert [both.offloaded(i) for i in range(5)] == [True, True, True, False, False]


@pytest.mark.parametrize("n", [1, 5, 12, 13, 50])
@pytest.mark.parametrize("k", [1, 3, 4])
def test_segments(n, k):
    stats = Segmented(k, Revolve(2)).stats(n)
    count = -(-n // k)
    assert stats.taped == n and stats.tape == min(k, n) and stats.slots <= 2
    assert stats.recomputed == k * (advances(count + 1, 2) - count)


@pytest.mark.parametrize("n, budget", [(64, 400), (64, 1000), (1000, 3000), (1000, 20_000)])
def test_auto_is_the_best_within_the_budget(n, budget):
    state, tape = 10, 100
    stats = auto(n, budget, state, tape).stats(n)
    assert stats.peak_bytes(state, tape) <= budget
    for k in range(1, n + 1):
        c = (budget - k * tape) // state
        if c >= 1:
            assert stats.recomputed <= Segmented(k, Revolve(c)).stats(n).recomputed


def test_auto_says_what_is_needed():
    with pytest.raises(ValueError, match="at least 110 are needed"):
        auto(10, 109, 10, 100)


def test_what_users_write():
    assert as_schedule("all") == All() and as_schedule("sqrt") == Sqrt() and as_schedule(3) == Revolve(3)
    assert as_schedule(Online(2)) == Online(2)
    with pytest.raises(ValueError, match="got 0"):
        as_schedule(0)
    with pytest.raises(TypeError, match="True"):
        as_schedule(True)
    with pytest.raises(ValueError, match="'al'"):
        as_schedule("al")
    with pytest.raises(ValueError, match="Online"):
        Sqrt().place(None)


def test_documented_examples_run():
    result = doctest.testmod(sys.modules[All.__module__])
    assert result.attempted > 2 and not result.failed


@pytest.mark.slow
def test_beta_counts_the_longest_chain():
    for c in range(1, 8):
        for r in range(1, 6):
            assert max(k for k in range(1, beta(c, r) + 2) if max_repeats(k, c) <= r) == beta(c, r)


@cache
def max_repeats(n: int, c: int) -> int:
    """The least possible number of times the most advanced step is advanced."""
    if n == 1:
        return 0
    if c == 1:
        return n - 1
    return min(max(max_repeats(n - m, c - 1), 1 + max_repeats(m, c)) for m in range(1, n))
