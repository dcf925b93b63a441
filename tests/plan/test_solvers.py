"""Solvers against brute force on random small problems."""

import doctest
import math

import pytest
from hypothesis import given, settings, strategies as st

from remat import RematError
from tests.plan.inside import (
    INF,
    Problem,
    States,
    bound,
    complete,
    contract as contracted,
    hull,
    keep_all,
    least,
    milp,
    reduce,
    reductions,
    solve,
    split,
)
from tests.plan.problems import best, check, frontier, layered, problems

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_never_worse_than_a_plan_handed_in(monkeypatch):
    """The hull misses the knapsack's optimum; a candidate that has it is taken, and named."""
    # Three independent ops of one input, 4 bytes: 3 bytes are worth 5 (the best rate), 2 + 2 are worth 6.
    reads, size = ((), (0,), (0,), (0,)), (0.0, 3.0, 2.0, 2.0)
    problem = Problem((INF, 5.0, 3.0, 3.0), reads, (0, 1, 2, 3), size, need=frozenset({1, 2, 3}))
    listed = solve(problem, 4, exact=False)
    assert (listed.solution.cost, listed.solver, listed.gap) == (5.0, "front", 0.0)
    monkeypatch.setattr("remat.plan.solve.portfolio.front", lambda *_: [])
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
        return set(_undominated({(p.bytes, round(p.cost, 6)) for p in points}))

    mapped = [complete(problem, smaller.named(p.saved)) for p in frontier(smaller.problem)]
    assert all(p is not None for p in mapped)
    assert outline(mapped) == outline(frontier(problem))


def _undominated(points):
    """Those of (bytes, price) that no other beats."""
    return [p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)]


@pytest.mark.skipif(not milp.available(), reason="needs SciPy")
@settings(max_examples=15, deadline=None)
@given(layered(), st.floats(0, 1))
def test_the_whole_program_agrees_with_brute_force(problem, share):
    smaller = reduce(problem).problem
    low, everything = least(problem).bytes, keep_all(problem)
    assert everything is not None
    budget = int(low + share * (everything.bytes - low))
    optimum = min(p.cost for p in frontier(problem) if p.bytes <= budget)
    found = milp.solve_exactly(smaller, budget, gap=0.0)
    assert found.solution is not None and found.lower_bound <= optimum + 1e-6
    check(smaller, found.solution)
    assert found.solution.bytes <= budget
    for solution in (found.solution, solve(problem, budget, gap=0.0, time_limit=10).solution):
        assert math.isclose(solution.cost, optimum, rel_tol=1e-3, abs_tol=1e-9)


def test_examples_in_docstrings_run():
    result = doctest.testmod(reductions)
    assert result.attempted and not result.failed


@settings(max_examples=66, deadline=None)
@given(problems())
def test_a_contracted_problem_has_the_same_optimum_at_every_budget(problem):
    smaller = contracted(problem)
    points, fewer = frontier(problem), frontier(smaller.problem)
    assert bool(points) == bool(fewer)
    mapped = [complete(problem, smaller.named(p.saved)) for p in fewer]
    for one, other in zip(fewer, mapped, strict=True):
        assert other is not None and other.bytes <= one.bytes and other.cost <= one.cost + 1e-9
    for budget in {p.bytes for p in points}:
        assert math.isclose(best(problem, budget), best(smaller.problem, budget))


def test_what_the_backward_needs_takes_a_chain_apart():
    """Nothing waits for what is there in every plan: it ends a part."""
    # Ops: the input, a product that is needed, its copy, a product, a cast of the same size that is needed.
    reads, need = ((), (0,), (1,), (2,), (3,)), frozenset({0, 1, 4})
    problem = Problem((INF, 9.0, 0.0, 7.0, 1.0), reads, (0, 1, 2, 3, 4), (8.0, 4.0, 4.0, 2.0, 2.0), need=need)
    smaller = contracted(problem)
    assert smaller.problem.reads.count(()) == 3
    assert len(split(smaller.problem)) == 3


def test_what_must_be_made_again_is_made_from_what_is_there():
    """The last op's result is needed and cannot be kept: what it reads is needed too, and ends its part."""
    problem = Problem(
        (INF, 9.0, 7.0, 5.0),
        ((), (0,), (1,), (2,)),
        (0, 1, 2, 3),
        (8.0, 4.0, 4.0, INF),
        need=frozenset({0, 3}),
    )
    smaller = contracted(problem).problem
    assert smaller.need == {0, 2, 3} and smaller.reads == ((), (), (1,), ())


@settings(max_examples=33, deadline=None)
@given(problems())
def test_the_parts_of_a_problem_add_up_to_it(problem):
    smaller = reduce(problem).problem
    parts = split(smaller)
    places = [v for part in parts for place in part.places for v in place]
    assert sorted(places) == sorted(smaller.relevant)
    for part in parts:
        ready = set()
        for op, reads in enumerate(part.problem.reads):
            assert ready.issuperset(reads)
            ready.update(part.problem.outputs[op])
    sums = [(0.0, 0.0)]
    for part in parts:
        points = [(p.bytes, p.cost) for p in frontier(part.problem)]
        for _ in part.places:
            sums = [(a + b, c + d) for a, c in sums for b, d in points]
            sums = _undominated(set(sums))
    assert set(sums) == set(_undominated({(p.bytes, p.cost) for p in frontier(smaller)}))


@settings(max_examples=20, deadline=None)
@given(
    problems(), st.integers(0, 20), st.lists(st.sampled_from([1e-7, 1e-3, 1.0, 1e4]), min_size=7, max_size=7)
)
def test_prices_of_all_magnitudes(problem, budget, scales):
    cost = tuple(c * s for c, s in zip(problem.cost, scales, strict=False))
    problem = Problem(cost, problem.reads, problem.producer, problem.size, need=problem.need)
    optimum = best(problem, budget)
    if optimum < INF:
        solved = solve(problem, budget, time_limit=10)
        assert solved.lower_bound <= optimum * (1 + 1e-12) <= solved.solution.cost * (1 + 1e-9)
        assert solved.gap <= 0.01


def test_early_layers_run_again_and_late_ones_are_kept():
    """Six equal layers, room for two and a half: the last two are kept."""
    count = 6
    reads = ((), *(((k,) if k % 2 else (0,)) for k in range(2 * count)))
    cost = (INF, *((3.0, 9.0) * count))
    need = frozenset(range(0, 2 * count + 1, 2))
    problem = Problem(cost, reads, tuple(range(2 * count + 1)), (4.0, *((8.0, 6.0) * count)), need=need)
    solved = solve(problem, 4 + 15)
    assert solved.solver == "exact" and solved.solution.saved == {0, 2 * count - 2, 2 * count}


def test_cheap_ops_are_not_run_again_where_there_is_room():
    """Their prices are lost beside the dear op's, but bytes are left for two of the three."""
    problem = Problem(
        (INF, 1e9, 1.0, 2.0, 3.0), ((), (0,), (0,), (0,), (0,)), (0, 1, 2, 3, 4), (4.0, 64.0, 8.0, 8.0, 8.0),
        need=frozenset(range(5)),
    )  # fmt: skip
    solved = solve(problem, 4 + 20)
    assert solved.solution.saved == {0, 3, 4} and solved.solution.cost == 1e9 + 1


def lora(layers, rank=16, width=4096):
    """Frozen products with a pair of low rank beside each: many small values of nearly one price a byte."""
    cost, reads, producer, size, need = [INF], [()], [0], [2.0 * width], {0}

    def op(price, bytes_, *of, needed=False):
        cost.append(float(price))
        reads.append(of)
        producer.append(len(cost) - 1)
        size.append(float(bytes_))
        need.update({len(producer) - 1} if needed else ())
        return len(producer) - 1

    def linear(x, inputs, outputs):
        frozen = op(2 * inputs * outputs, 2 * outputs, x)
        narrow = op(2 * inputs * rank, 2 * rank, x, needed=True)
        wide = op(2 * rank * outputs, 2 * outputs, narrow)
        return op(0.006 * outputs, 2 * outputs, frozen, op(0.004 * outputs, 2 * outputs, wide), needed=True)

    x = 0
    for _ in range(layers):
        y = op(0.01 * width, 2 * width, x, needed=True)
        q, k, v = linear(y, width, width), linear(y, width, width // 4), linear(y, width, width // 4)
        mixed = op(3 * width * width, 2 * width, q, k, v, needed=True)
        x = op(0.006 * width, 2 * width, x, linear(mixed, width, width), needed=True)
        hidden = op(0.01 * width, 7 * width, linear(x, width, 7 * width // 2), needed=True)
        x = op(0.006 * width, 2 * width, x, linear(hidden, 7 * width // 2, width), needed=True)
    return Problem(tuple(cost), tuple(reads), tuple(producer), tuple(size), need=frozenset(need))


def test_an_op_of_many_results_is_solved():
    """Twenty results, each read by an op of its own: a million ways to keep some of them."""
    count = 20
    reads = ((), *((k,) for k in range(count)))
    producer = (*([0] * count), *range(1, count + 1))
    need = frozenset(range(count, 2 * count))
    problem = Problem((5.0, *([3.0] * count)), reads, producer, (1.0,) * (2 * count), need=need)
    assert States(split(problem)[0].problem).table is None
    assert solve(problem, count // 2).solution.bytes <= count // 2


def test_a_plan_is_the_same_on_every_run():
    """On every rank, however busy: HiGHS stops by its gap and by nodes, never by a clock."""
    problem = lora(4)
    everything, low = keep_all(problem), least(problem).bytes
    assert everything is not None
    budget = low + int(0.3 * (everything.bytes - low))
    found = [solve(problem, budget, time_limit=0.01) for _ in range(3)]
    assert len({(s.solution.saved, s.lower_bound) for s in found}) == 1 and found[0].solver == "exact"
