"""What is planned anew: prices that change, and calls that meet other regions than planned."""

import pytest
import torch

from remat import (
    RematError,
    checkpoint_policy,
    explain,
    fit,
    register_op,
    remat,
    save_everything,
    saved_residuals,
)


def custom(name):
    @torch.library.custom_op(f"remat_priced_later::{name}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, g: g * 2)
    return op


@pytest.mark.filterwarnings("ignore:.*register_op")
def test_a_price_that_is_registered_later_counts_for_what_was_planned():
    op = custom("plan")

    def fn(x):
        return (op(x.sin()).exp() @ x).tanh()

    x, policy = torch.ones(32, 32, requires_grad=True), checkpoint_policy(budget=1.0, cost="flops")
    before = policy.plan(fn, x).step_flops  # pyright: ignore[reportAttributeAccessIssue]
    register_op("remat_priced_later::plan", flops=lambda shape: 12_345_678)
    after = policy.plan(fn, x).step_flops  # pyright: ignore[reportAttributeAccessIssue]
    assert after > before and after > 12_345_678


@pytest.mark.filterwarnings("ignore:.*register_op")
def test_it_counts_for_regions_that_have_run():
    op = custom("region")

    def fn(x):
        return (op(x.sin()).cos().exp() @ x).tanh().sin()

    x = torch.ones(32, 32, requires_grad=True)
    region = remat(fn, policy=lambda info: (info.flops or 0) > 10**9)
    kept = []
    for price in (0, 10**10):
        register_op("remat_priced_later::region", flops=lambda shape, price=price: price)
        for _ in range(3):
            region(x).sum().backward()
        # (A custom op may draw: a generator's state is kept for it.)
        report = saved_residuals(region, x)
        kept.append(report.kept_bytes - sum(r.bytes for r in report if r.why == "random"))
    assert kept == [0, 32 * 32 * 4]


@pytest.mark.filterwarnings("ignore:.*register_op")
def test_it_counts_for_budgets_that_have_run():
    op = custom("budget")

    def fn(x):
        return (op(op(x.sin()).cos()).exp().sin() @ x).tanh()

    x = torch.ones(32, 32, requires_grad=True)
    region = remat(fn, policy=checkpoint_policy(budget=0.6, cost="flops"))
    ops = []
    for price in (10**9, 0):
        register_op("remat_priced_later::budget", flops=lambda shape, price=price: price)
        for _ in range(5):
            region(x).sum().backward()
        ops.append(sum("remat_priced_later" in str(r.op) for r in saved_residuals(region, x)))
    assert ops[0] > 0 == ops[1]


def block(x):
    return ((x @ x).tanh() @ x).sin()


@pytest.mark.parametrize("skip", [(), (3,), (0, 1, 2), (1,), (0, 1, 2, 3)])
def test_a_plan_of_a_model_says_that_fewer_regions_were_called(skip):
    region = remat(block, policy=checkpoint_policy(budget=0.5))

    def fn(x, skip):
        for k in range(4):
            if k not in skip:
                x = region(x)
        return x.sum()

    x = torch.eye(16, requires_grad=True)
    plan = fit(fn, x, (), budget=0.6, cost="flops")
    with torch.no_grad():
        plan(x, skip)
    if 0 < len(skip) < 4:
        with pytest.raises(RematError, match=f"{4 - len(skip)} of the 4 planned regions"):
            plan(x, skip)
    elif skip:
        with pytest.warns(UserWarning, match="None of the 4 planned regions was called"):
            plan(x, skip)
    else:
        plan(x, skip)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("how", ["explain", "saved", "vmap", "region around", "compiled"])
def test_a_plan_of_a_model_is_silent_where_its_regions_have_others_policies(how):
    """Nobody planned them is told only of a call of the user's in which none of them was met."""
    region = remat(block, policy=checkpoint_policy(budget=0.5))
    plan = fit(lambda x: region(region(x)).sum(), torch.eye(8, requires_grad=True), budget=0.6)
    x = torch.eye(8, requires_grad=True)
    calls = {
        "explain": lambda: explain(plan, x),
        "saved": lambda: saved_residuals(plan, x),
        "vmap": lambda: torch.vmap(plan)(torch.stack([x.detach(), x.detach()])),
        "region around": lambda: remat(plan, policy=save_everything)(x).backward(),
        "compiled": lambda: compiled(x).backward(),
    }
    compiled = torch.compile(plan, backend="aot_eager")
    for _ in range(2):
        calls[how]()
