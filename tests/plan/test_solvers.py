"""Solvers against brute force on random small problems."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat import RematError
from tests.plan.inside import INF, Problem, bound, complete, hull, keep_all, least, milp, reduce, solve
from tests.plan.problems import check, frontier, layered, problems

pytestmark = pytest.mark.filterwarnings("error")


@settings(max_examples=100, deadline=None)
@given(problems())
def test_hull_is_the_lower_convex_hull_of_all_choices(problem):
    points = frontier(problem)
    corners = hull(problem)
    assert bool(points) == bool(corners)
    if not points:
        return
    fewest = min(p.bytes for p in points)
    cheapest = min(p.cost for p in points)
    assert corners[0].bytes == fewest == least(problem).bytes
    assert corners[0].cost == min(p.cost for p in points if p.bytes == fewest)
    assert corners[-1].cost == cheapest
    for point in points:
        assert bound(corners, point.bytes) <= point.cost + 1e-9
    for corner in corners:
        check(problem, corner)
        assert math.isclose(bound(corners, corner.bytes), corner.cost)


@pytest.mark.slow
@settings(max_examples=66, deadline=None)
@given(problems(), st.integers(0, 20))
def test_fallback_is_feasible_and_its_bound_holds(problem, budget):
    points = [p for p in frontier(problem) if p.bytes <= budget]
    if not points:
        with pytest.raises(RematError):
            solve(problem, budget, exact=False)
        return
    solved = solve(problem, budget, exact=False)
    check(problem, solved.solution)
    assert solved.solution.bytes <= budget
    assert solved.lower_bound - 1e-9 <= min(p.cost for p in points) <= solved.solution.cost + 1e-9


@pytest.mark.skipif(not milp.available(), reason="needs SciPy")
@settings(max_examples=66, deadline=None)
@given(problems(), st.integers(0, 20))
def test_exact_solver_agrees_with_brute_force(problem, budget):
    points = [p for p in frontier(problem) if p.bytes <= budget]
    if not points:
        with pytest.raises(RematError):
            solve(problem, budget)
        return
    solved = solve(problem, budget, gap=0.0, time_limit=10)
    check(problem, solved.solution)
    assert solved.solution.bytes <= budget
    optimum = min(p.cost for p in points)
    assert math.isclose(solved.solution.cost, optimum, rel_tol=1e-3, abs_tol=1e-9)
    assert solved.lower_bound <= optimum + 1e-6
    assert solved.gap <= 2e-3


def test_never_worse_than_a_plan_handed_in():
    """The fallback misses the knapsack's optimum; a candidate that has it is taken, and named."""
    # Three independent ops of one input, 4 bytes: 3 bytes are worth 5 (the best rate), 2 + 2 are worth 6.
    reads, size = ((), (0,), (0,), (0,)), (0.0, 3.0, 2.0, 2.0)
    problem = Problem((INF, 5.0, 3.0, 3.0), reads, (0, 1, 2, 3), size, need=frozenset({1, 2, 3}))
    assert solve(problem, 4, exact=False).solution.cost == 6.0
    solved = solve(problem, 4, exact=False, candidates=[("other", {2, 3})])
    assert (solved.solution.cost, solved.solver, solved.solution.bytes) == (5.0, "other", 4)


def test_least_bytes_are_named_when_the_budget_is_below():
    problem = Problem((INF, 1.0), ((), (0,)), (0, 1), (8.0, 4.0), need=frozenset({0, 1}))
    with pytest.raises(RematError, match="At least 8 bytes must be kept"):
        solve(problem, 7)
    assert solve(problem, 8).solution.replayed == {1}
    everything = keep_all(problem)
    assert everything is not None and everything.bytes == 12


@settings(max_examples=33, deadline=None)
@given(problems())
def test_without_views_the_choices_are_the_same(problem):
    """The frontier of the reduced problem, choice by choice, is that of the whole."""
    smaller = reduce(problem)

    def outline(points):
        return {(p.bytes, round(p.cost, 6)) for p in points if not any(_beats(q, p) for q in points)}

    mapped = [complete(problem, smaller.original(p.saved)) for p in frontier(smaller.problem)]
    assert all(p is not None for p in mapped)
    assert outline(mapped) == outline(frontier(problem))


def _beats(one, other):
    return (
        one.bytes <= other.bytes
        and one.cost <= other.cost
        and (one.bytes, one.cost) != (other.bytes, other.cost)
    )


@pytest.mark.skipif(not milp.available(), reason="needs SciPy")
@settings(max_examples=15, deadline=None)
@given(layered(), st.floats(0, 1))
def test_the_whole_program_agrees_with_brute_force(problem, share):
    smaller = reduce(problem).problem
    low, everything = least(problem).bytes, keep_all(problem)
    assert everything is not None
    budget = int(low + share * (everything.bytes - low))
    optimum = min(p.cost for p in frontier(problem) if p.bytes <= budget)
    found = milp.solve_exactly(smaller, budget, gap=0.0, time_limit=10)
    assert found.solution is not None and found.lower_bound <= optimum + 1e-6
    check(smaller, found.solution)
    assert found.solution.bytes <= budget
    for solution in (found.solution, solve(problem, budget, gap=0.0, time_limit=10).solution):
        assert math.isclose(solution.cost, optimum, rel_tol=1e-3, abs_tol=1e-9)
