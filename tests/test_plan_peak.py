"""Budgets on the peak: simulated live bytes through forward and backward."""

import pytest
import torch

from remat import checkpoint_policy, remat
from remat.plan import BudgetPolicy, Plan, plan_model
from remat.plan.peak import highest_within
from remat.policies import Policy
from remat.transforms._errors import RematError
from tests.plan_models import GPTBlock


def budgeted(policy: Policy) -> BudgetPolicy:
    assert isinstance(policy, BudgetPolicy)
    return policy


def deep():
    return torch.nn.Sequential(*[GPTBlock(32, 4) for _ in range(3)]), torch.randn(
        2, 8, 32, requires_grad=True
    )


def test_a_wider_peak_never_recomputes_more():
    model, x = deep()
    low, high = (BudgetPolicy(b).plan(model, x * 1) for b in (0, 1.0))
    plans = []
    for peak in range(low.peak_bytes, high.peak_bytes + 16384, 16384):
        plans.append(budgeted(checkpoint_policy(peak=peak)).plan(model, x * 1))
        assert plans[-1].peak_bytes <= peak
    costs = [plan.cost for plan in plans]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[len(costs) // 2] > costs[-1] == 0
    assert plans[-1].kept_bytes == high.kept_bytes


def test_peaks_that_do_not_rise_with_the_budget():
    """What fits is looked for from the top; a wider limit still finds no lower budget."""

    def peak(budget):
        return 90 if budget < 10 else 50 + budget // 8 + 6 * (budget // 10 % 2)

    found = [highest_within(limit, 0, 160, lambda b: b, peak) for limit in range(52, 80)]
    assert found == sorted(found) and all(
        peak(b) <= limit for b, limit in zip(found, range(52, 80), strict=True)
    )
    assert len(set(found)) > 10
    with pytest.raises(RematError, match="lowest that was found is 52 bytes"):
        highest_within(10, 0, 160, lambda b: b, peak)


def test_gradients_under_a_peak_are_those_without():
    model, x = deep()
    low, high = (BudgetPolicy(b).plan(model, x * 1).peak_bytes for b in (0, 1.0))
    region = remat(model, policy=checkpoint_policy(peak=(low + high) // 2))
    grads = []
    for fn in (model, region):
        model.zero_grad()
        fn(x * 1).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_peak_beside_a_budget_keeps_to_both():
    model, x = deep()
    plan = budgeted(checkpoint_policy(budget=0.5, peak="1GiB")).plan(model, x * 1)
    assert 0 < plan.kept_bytes <= plan.default_bytes / 2
    assert plan == BudgetPolicy(0.5).plan(model, x * 1)
    assert Plan.from_json(plan.to_json()).peak_bytes == plan.peak_bytes > plan.kept_bytes


def test_a_model_plan_within_a_peak():
    model, x = deep()
    regions = [remat(block, policy=checkpoint_policy(budget=0.5)) for block in model]

    def through(x):
        for region in regions:
            x = region(x)
        return x

    low, high = (plan_model(through, x, budget=b).peak_bytes for b in (0, 1.0))
    plans = [plan_model(through, x, peak=p) for p in range(low, high, (high - low) // 6)]
    costs = [plan.cost for plan in plans]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]
    with pytest.raises(RematError, match=f"lowest that was found is {low:,} bytes"):
        plan_model(through, x, peak=low - 1)


@pytest.mark.parametrize(
    ("peak", "message"),
    [
        (0, "positive number of bytes, got 0"),
        (-5, "positive number of bytes"),
        (0.5, "positive number of bytes, got 0.5"),
        (True, "positive number of bytes, got True"),
        ("lots", "'lots' is no peak"),
    ],
)
def test_bad_peaks(peak, message):
    with pytest.raises(RematError, match=message):
        checkpoint_policy(peak=peak)
    with pytest.raises(RematError, match=message):
        BudgetPolicy(1.0, peak=peak)


def test_a_peak_out_of_reach_gives_the_lowest():
    model, x = deep()
    with pytest.raises(RematError, match="A peak of 5,000 bytes cannot be met .* lowest that was found is"):
        budgeted(checkpoint_policy(peak=5000)).plan(model, x * 1)
