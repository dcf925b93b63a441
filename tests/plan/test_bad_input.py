"""What planners are given that cannot be planned, or only just: told in words, or simply right."""

import contextlib
import io
import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from remat import RematError, checkpoint_policy, fit, remat
from remat.plan import pareto

BUDGET = checkpoint_policy(budget=0.5)
X = torch.randn(4, 8)


def product(x):
    return (x @ x.mT).sin() @ x


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))


def leaf(rows=4):
    return torch.randn(rows, 8, requires_grad=True)


def test_what_fails_under_nested_budgets_is_not_logged_at_each_depth():
    region = lambda x: torch.tanh(x @ x[:3])  # noqa: E731
    for _ in range(3):
        region = remat((lambda inner: lambda x: inner(inner(x)).sin())(region), policy=BUDGET)
    log, said = logging.getLogger("torch._subclasses.fake_tensor"), io.StringIO()
    handler = logging.StreamHandler(said)
    log.addHandler(handler)
    try:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            region(leaf(8))
        with pytest.raises(RematError, match="same reduction dim"):
            fit(lambda x: region(x).sum(), leaf(8), budget=0.5)
    finally:
        log.removeHandler(handler)
    assert not said.getvalue() and not log.disabled


PLANNERS = {
    "pareto": lambda fn, x: pareto(fn, x),
    "plan": BUDGET.plan,
    "fit of stages": lambda fn, x: fit([fn, fn], x, peak="1MiB"),
    "fit of a function": lambda fn, x: fit(remat(fn, policy=BUDGET), x, budget=0.5),
}


@pytest.mark.parametrize("planner", PLANNERS)
def test_nothing_to_differentiate_is_told(planner):
    with pytest.raises(RematError, match=r"no gradient flows through .*Write x.requires_grad_\(\)"):
        PLANNERS[planner](product, X)
    with pytest.raises(RematError, match="no gradient flows through"):
        PLANNERS[planner](lambda x: product(x.detach()), leaf())


def test_integers_no_results_and_inference_have_no_gradient():
    for fn, x in ((lambda i: i + 1, torch.arange(4)), (lambda x: None, leaf())):
        with pytest.raises(RematError, match="nothing to plan: no gradient flows through lambda at"):
            pareto(fn, x)
    with torch.inference_mode(), pytest.raises(RematError, match="outside of torch.inference_mode"):
        BUDGET.plan(network(), X)
    with torch.no_grad():
        assert BUDGET.plan(network(), X).kept_bytes > 0


@pytest.mark.parametrize("fn", (lambda x: x * 2, lambda x: x.view(-1), lambda x: x, torch.sin))
def test_where_nothing_can_be_saved_the_frontier_is_one_point(fn):
    found = pareto(fn, leaf(), points=3, torch_solvers=())
    assert {(point.kept_bytes, point.cost) for point in found.of("remat")} == {(found.default_bytes, 0.0)}


def test_autocast_around_a_budget_and_around_some_calls_of_it():
    fn = network()
    region = remat(fn, policy=BUDGET)
    cast = lambda **options: torch.autocast("cpu", torch.bfloat16, **options)  # noqa: E731
    for around in (cast, contextlib.nullcontext, cast, lambda: cast(cache_enabled=False)):
        for inner in (fn, region):
            for p in fn.parameters():
                p.grad = None
            torch.manual_seed(1)
            x = leaf()
            with around():
                # A cast that is in autocast's cache does not run in the second call.
                out = inner(x) + inner(x)
            out.float().sum().backward()
            got = [x.grad, *(p.grad for p in fn.parameters())]
            if inner is fn:
                expected = got
            else:
                for mine, theirs in zip(got, expected, strict=True):
                    torch.testing.assert_close(mine, theirs)


def test_a_plan_made_outside_of_autocast_is_told_inside():
    fn = network()
    region = remat(fn, policy=BUDGET.plan(fn, leaf()))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RematError, match="autocast"):
        region(leaf())


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(BUDGET, marks=pytest.mark.slow),
        checkpoint_policy(budget="free"),
        checkpoint_policy(peak="10KiB"),
    ],
)
def test_another_length_under_compile_is_one_graph_for_all(policy):
    torch._dynamo.reset()
    fn, counter = network(), CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda x: remat(fn, policy=policy)(x).sum(), backend=counter, fullgraph=True)
    for rows in (4, 6, 10, 5):
        x = leaf(rows)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        step(x).backward()
        torch.testing.assert_close(x.grad, torch.autograd.grad(fn(x).sum(), x)[0])
    assert counter.frame_count == 1


@pytest.mark.slow
def test_a_plan_of_a_model_compiles_at_every_length():
    """A compiler looks at a graph more than once: each time the regions have their plans again."""
    blocks = [network() for _ in range(2)]
    regions = [remat(block, policy=BUDGET) for block in blocks]
    planned = fit(lambda x: regions[1](regions[0](x)).sum(), leaf(), budget=0.6)
    compiled = torch.compile(planned, backend="aot_eager")
    for rows in (4, 6, 9):
        x = leaf(rows)
        expected = torch.autograd.grad(blocks[1](blocks[0](x)).sum(), x)
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x), expected)
