"""Keep, recompute, or send to the host: against every possible choice on small problems."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings

from remat.plan.solve.host import front, place
from remat.plan.solve.problem import INF, Problem, complete, keep_all
from tests.plan.problems import frontier, layered, problems


def everything(problem: Problem, window: float) -> list[tuple[int, float]]:
    """All (bytes on the device, price) that any verdicts reach."""
    values = [v for v in problem.relevant if 0 < problem.size[v] < INF]
    found = []
    for verdicts in itertools.product(range(3), repeat=len(values)):
        kept = {v for v, verdict in zip(values, verdicts, strict=True) if verdict}
        host = sum(problem.size[v] for v, verdict in zip(values, verdicts, strict=True) if verdict == 2)
        if host <= window and (solution := complete(problem, kept)) is not None:
            device = {v for v, verdict in zip(values, verdicts, strict=True) if verdict == 1}
            found.append((int(sum(problem.size[v] for v in solution.saved & device)), solution.cost))
    return found


@settings(max_examples=25, deadline=None)
@given(problems(ops=6))
def test_the_front_is_that_of_all_choices(problem):
    problem = replace(problem, keep=())
    window = 0.3 * sum(s for s in problem.size if s < INF)
    points, every = front(problem, window), everything(problem, window)
    for budget in sorted({d for d, _ in every}):
        best = min(c for d, c in every if d <= budget)
        mine = min((p.cost for p in points if p.device <= budget), default=INF)
        assert mine == pytest.approx(best, rel=1e-6, abs=1e-9)
    for point in points:
        solution = complete(problem, point.kept | point.sent)
        assert solution is not None and solution.cost == pytest.approx(point.cost, rel=1e-6, abs=1e-9)
        assert sum(problem.size[v] for v in point.sent) == point.host <= window


@settings(max_examples=10, deadline=None)
@given(layered())
def test_the_host_never_costs_and_the_gap_is_proved(problem):
    most = keep_all(problem).bytes
    windows = (0, 0.3 * most, INF)
    found = [[front(problem, window)] * 8 for window in windows]
    least = min(s.bytes for s in frontier(problem))
    for budget in (8 * least, 4 * (least + most)):
        plans = [place(fronts, budget) for fronts in found]
        assert all(plan is not None and plan.device <= budget and plan.gap <= 0.01 for plan in plans)
        costs = [plan.cost for plan in plans]
        assert costs == sorted(costs, reverse=True) and costs[-1] == 0
    assert place(found[0], -1) is None
