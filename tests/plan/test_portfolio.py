"""Torch's own plans: beside ours where the proof is open, and what dropout does to them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.planner.compiled import compiled_problem
from remat import checkpoint_policy, remat
from remat.plan import BUILT_IN_POLICIES, BudgetPolicy, Flops, Plan
from tests.plan.inside import complete, graph_of, policy, record, torch_plan, torch_solution
from tests.plan.models import GPTBlock


def test_never_worse_than_torch():
    """Every plan of torch's that fits the budget costs at least what ours does."""
    block, x = GPTBlock(32, 4), torch.randn(2, 8, 32)
    graph = graph_of(block, (x,))
    problem = graph.problem(Flops())
    for share in (0.2, 0.45, 0.7, 0.9):
        plan = policy.plan_graph(graph, BudgetPolicy(share, "flops"), "block")
        theirs = torch_solution(graph, problem, plan.budget / graph.kept_by_default)
        assert plan.kept_bytes <= plan.budget
        assert theirs.bytes > plan.budget or plan.cost <= theirs.cost


class Rough(Flops):
    """FLOPs that are told to a tenth of a step."""

    accuracy = 0.1


@pytest.mark.parametrize("accuracy", [0.0, 0.1])
def test_a_ready_policy_is_followed_where_prices_do_not_tell_the_plan_from_it(accuracy):
    """It fits, it is named with what is forgone, and the bound is that of the better plan."""
    block, x = GPTBlock(32, 4), torch.randn(2, 8, 32)
    exact = BudgetPolicy(0.9, Flops()).plan(block, x)
    assert exact.cost > 0 and exact.solver not in BUILT_IN_POLICIES and not exact.forgone
    rough = BudgetPolicy(0.9, Rough() if accuracy else Flops()).plan(block, x)
    if not accuracy:
        assert rough == exact
        return
    assert rough.solver in BUILT_IN_POLICIES and rough.kept_bytes <= rough.budget == exact.budget
    assert rough.forgone == pytest.approx(rough.cost - exact.cost) and rough.forgone > 0
    assert rough.lower_bound == exact.lower_bound and rough.gap > exact.gap
    assert f"as {rough.solver}: another plan saves" in str(rough)
    assert Plan.from_json(rough.to_json()).forgone == rough.forgone


def noisy(weight, x):
    """Products with dropout in between, out of place as compiled graphs have it."""
    for _ in range(3):
        x = torch.ops.aten.native_dropout(torch.tanh(x @ weight), 0.5, True)[0]
    return x @ weight


def test_torch_draws_anew_under_a_budget_and_we_do_not():
    """Torch's solver replays the draws at low budgets: wrong gradients; ours are right at every budget."""
    torch.manual_seed(0)
    weight, x = torch.randn(16, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    joint = record(noisy, (weight, x))
    compiled = compiled_problem(joint, Flops())
    verdicts = {}
    for budget in (0.0, 0.35, 0.5, 0.65, 0.8, 1.0):
        saved = compiled.saved(set(torch_plan(joint, budget).values))
        verdicts[budget] = complete(compiled.problem, saved) is not None
        grads = []
        for fn in (noisy, remat(noisy, policy=checkpoint_policy(budget=budget))):
            torch.manual_seed(1)
            grads.append(torch.autograd.grad(fn(weight, x).square().sum(), (weight, x)))
        torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
    assert verdicts[1.0] and not verdicts[0.0]


@pytest.mark.parametrize("budget", [0.5, "free"])
def test_plans_are_made_and_replayed_under_a_flop_counter(budget):
    """Its module tracker hooks gradients of leaves, which planning and replaying must not meet."""
    block, x = GPTBlock(32, 4), torch.randn(2, 8, 32, requires_grad=True)
    totals = []
    region = remat(block, policy=checkpoint_policy(budget=budget, cost="flops"))
    for fn in (block, region):
        with FlopCounterMode(display=False) as counter:
            fn(x * 1).sum().backward()
        totals.append(counter.get_total_flops())
        assert set(counter.get_flop_counts()) > {"Global"}
    again = BudgetPolicy(budget, "flops").plan(block, x * 1).recomputed_flops
    # Torch's table has no CPU attention: it is in neither total.
    assert totals[1] - totals[0] == pytest.approx(again, abs=4 * 2 * 4 * 8 * 8 * 8)
