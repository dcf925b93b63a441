"""Keep, recompute, or send to the host: against every possible choice on small problems."""

import gc
import itertools
import pkgutil

import pytest
import torch
from hypothesis import given, settings

from remat import checkpoint_policy, fit, nn, remat
from remat.plan import Plan, Roofline
from remat.transforms import RematError
from tests.inside import is_fake
from tests.plan.inside import INF, Graph, Problem, complete, front, keep_all, listen, over_link, place, record
from tests.plan.models import GPTBlock
from tests.plan.problems import frontier, layered, problems
from tests.plan.test_eager import gradients


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
    everything_kept = keep_all(problem)
    assert everything_kept is not None
    most = everything_kept.bytes
    windows = (0, 0.3 * most, INF)
    found = [[front(problem, window)] * 8 for window in windows]
    least = min(s.bytes for s in frontier(problem))
    for budget in (8 * least, 4 * (least + most)):
        plans = [place(fronts, budget) for fronts in found]
        assert all(plan is not None and plan.device <= budget and plan.gap <= 0.01 for plan in plans)
        costs = [plan.cost for plan in plans if plan is not None]
        assert costs == sorted(costs, reverse=True) and costs[-1] == 0
    assert place(found[0], -1) is None


def test_a_plan_over_a_link_is_carried_out():
    """Values go to the host and come back: gradients are bitwise those without."""
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(GPTBlock(32, 4) for _ in range(4))
    regions = [remat(block, policy=checkpoint_policy(budget=0.5)) for block in blocks]

    def through(x):
        for region in regions:
            x = region(x)
        return x

    x = torch.randn(4, 16, 32, requires_grad=True)
    expected = gradients(torch.nn.Sequential(*blocks), blocks, x)
    without = fit(through, x, budget=0.5)
    plan = fit(through, x, budget=0.5, link=1e12)
    sent = sum(region.sent_bytes for region in plan.regions)
    assert 0 < sent and plan.cost < without.cost and plan.kept_bytes <= plan.budget == without.budget
    assert plan.gap <= 0.01 and "on the host" in str(plan) and not plan.regions[-1].sent
    with listen() as heard:
        torch.testing.assert_close(gradients(plan, blocks, x), expected, rtol=0, atol=0)
    assert sum(k.tensor.untyped_storage().nbytes() for k in heard if k.away) == sent
    assert Plan.from_json(plan.regions[0].to_json()) == plan.regions[0]
    slow = fit(through, x, budget=0.5, link=1.0)
    assert slow.cost <= without.cost * 1.01 and not any(region.sent for region in slow.regions)


@pytest.mark.slow
def test_equal_layers_are_traced_and_solved_once(monkeypatch):
    """However many there are: one graph, one problem, and a front for each window; nothing is left of it."""
    solved, problems, traced = [], [], []
    for name, calls in (("remat.plan.joined.front", solved), ("remat.plan.model.Graph.problem", problems)):
        counted(monkeypatch, name, calls)
    counted(monkeypatch, "remat.plan.calls.cache.record", traced)
    found = []
    for depth in (4, 8):
        stack = torch.nn.Sequential(*(GPTBlock(32, 4) for _ in range(depth)))
        nn.apply(stack, layers="*", policy=checkpoint_policy(budget=0.5))
        x = torch.randn(4, 16, 32, requires_grad=True) * 1
        plan = fit(lambda x, stack=stack: stack(x), x, budget=0.7, link="gh200", device="h100")
        assert len(plan.regions) == depth and any(region.sent for region in plan.regions)
        found.append((len(solved), len(problems), len(traced)))
        assert not any(is_fake(o) for o in gc.get_objects() if isinstance(o, torch.Tensor))
    # The first one, whose input is the model's, is a kind of its own. Each kind is solved with the window, a
    # smaller one that does no better, and without: for the last region, and to see that the host is worth it.
    # (Of equal calls some are looked at, forwards alone, once.)
    assert found == [(6, 2, 4), (12, 4, 5)]


@pytest.mark.parametrize("share", [0.08, 0.12, 0.2])
def test_what_is_on_its_way_leaves_room_for_what_is_kept(share):
    """Of a fast link as much is used as there is room for. The window was halved twice, then given up."""
    x = torch.empty(4, 64, 64, device="meta", requires_grad=True)
    graph, count = Graph(record(GPTBlock(64, 4).to("meta"), (x,))), 16
    problem = graph.problem(Roofline("h100"))
    budget = int(share * count * graph.kept_by_default)
    last, found = front(problem, 0), []
    for sixteenth in range(17):
        window = sixteenth / 16 * graph.kept_by_default
        points = front(problem, window, lambda value: value < len(graph.ops))
        moving = 2 * max(point.host for point in points)
        if (placed := place([points] * (count - 1) + [last], budget - moving)) is not None:
            found.append(placed.cost)
    mine = over_link([graph] * count, [problem] * count, budget, 1e15)
    assert mine is not None and mine.joined.device <= budget
    assert mine.joined.cost <= min(found)


def counted(monkeypatch, name, calls):
    """Have every call of a function noted."""
    module, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(module)
    real = getattr(owner, attribute)
    monkeypatch.setattr(owner, attribute, lambda *args, **kwargs: calls.append(name) or real(*args, **kwargs))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0.5, "link": "tin cans"}, "one of pcie4, pcie5, gh200"),
        ({"peak": "1GiB", "link": "pcie5"}, "goes with a budget"),
        ({"budget": 0.5, "link": "pcie5", "cost": "flops"}, "prices in seconds"),
    ],
)
def test_what_a_link_needs(options, said):
    block, x = GPTBlock(32, 4), torch.randn(4, 16, 32, requires_grad=True)
    with pytest.raises(RematError, match=said):
        region = remat(block, policy=checkpoint_policy(budget=0.5))
        fit(lambda x: region(x), x, **options)
