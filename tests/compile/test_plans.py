"""A budget plans for a compiled region what it plans for the same region in eager."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from remat import checkpoint_policy, remat, save_costlier_than
from remat.nn import apply as remat_apply
from tests.compile.inside import BudgetPolicy, describe
from tests.compiled import compiled
from tests.helpers import rand

HALF = checkpoint_policy(budget=0.5)
outside = rand(4, 4).requires_grad_()
table = rand(4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 4), nn.Sigmoid())


def of_pair(w, x):
    return torch.tanh(x @ w).sin()


def of_tree(p, x):
    return torch.tanh(x * p["plain"] @ p["w"]).sin() @ p["parameter"]


def of_outside(x):
    return torch.tanh(x * table @ outside).sin()


def around(h):
    return lambda x: torch.tanh(x @ outside).sin() * h


pair: Any = remat(of_pair, policy=HALF)
tree: Any = remat(of_tree, policy=HALF)
far: Any = remat(of_outside, policy=HALF)


def params() -> dict[str, torch.Tensor]:
    return {"w": rand(4, 4).requires_grad_(), "plain": rand(4), "parameter": nn.Parameter(rand(4, 4))}


X = rand(3, 4)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    # Parameters and buffers are free, as is what a container's owner differentiates by.
    "module": (remat(network().double().eval(), policy=HALF), (X,)),
    "captured": (far, (X,)),
    "container": (lambda p, x: tree(p, x.exp()), (params(), X)),
    # An argument of its own is not, whether it requires grad or not.
    "arguments": (pair, (rand(4, 4).requires_grad_(), X)),
    "keyword": (lambda w, x: pair(w, x=x), (rand(4, 4).requires_grad_(), X)),
    "intermediate": (lambda x: remat(around(x.sin()), policy=HALF)(x), (X,)),
    "made inside": (lambda x: remat(of_outside, policy=HALF)(x), (X,)),
    "grad": (grad(lambda w, x: pair(w, x.exp()).sum()), (rand(4, 4), X)),
    "grad of a container": (
        grad(lambda p, x: tree(p, x).sum()),
        ({k: p.detach() for k, p in params().items()}, X),
    ),
    "vmap of grad": (vmap(grad(lambda w, x: pair(w, x).sum()), (None, 0)), (rand(4, 4), X[:, None])),
}


@pytest.fixture
def plans(monkeypatch):
    """What was planned: bytes by default and under the plan, and the positions of the ops chosen."""
    torch._dynamo.reset()
    made: list[tuple[Any, ...]] = []
    plan = BudgetPolicy._plan

    def spy(self, *args):
        got = plan(self, *args)
        made.append((got.default_bytes, got.kept_bytes, got.chosen))
        return got

    monkeypatch.setattr(BudgetPolicy, "_plan", spy)
    return made


@pytest.mark.filterwarnings("ignore:A budget of 0.5 is below")
@pytest.mark.parametrize("call", CALLS)
def test_a_compiled_region_is_planned_as_in_eager(call, plans):
    fn, args = CALLS[call]
    fn(*args)
    [eager] = plans
    plans.clear()
    compiled(fn)(*args)
    assert set(plans) == {eager}


POLICIES = {
    "budget": lambda x: checkpoint_policy(budget=x),
    "cost": save_costlier_than,
    "both": lambda x: checkpoint_policy(budget=x) | save_costlier_than(x),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A budget of")
@pytest.mark.parametrize("name", POLICIES)
def test_a_number_that_changes_is_a_constant_of_each_graph(name):
    """Dynamo makes a symbol of a float that it finds changed."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = compiled(lambda policy, x: remat(lambda y: torch.sin(y @ y).cos(), policy=policy)(x).sum())
    for number in (0.5, 0.7, 0.9, 0.7):
        x = rand(4, 4).requires_grad_()
        run(POLICIES[name](number), x).backward()
        torch.testing.assert_close(
            x.grad, torch.func.grad(lambda y: torch.sin(y @ y).cos().sum())(x.detach())
        )
    # Equal policies are one: the last number was compiled for already.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


def test_equal_policies_have_one_number_which_is_not_pickled():
    for name, make in POLICIES.items():
        assert describe(make(0.5)) == describe(make(0.5)) != describe(make(0.25)), name
        policy = make(0.5)
        assert pickle.loads(pickle.dumps(policy)) == policy
        assert b"number" not in pickle.dumps(policy)


@pytest.mark.parametrize("call", ["module", "captured"])
def test_parameters_and_captured_tensors_are_free(call, plans):
    fn, args = CALLS[call]
    compiled(fn)(*args)
    # What is counted are the argument and what ops make of it.
    width = 16 if call == "module" else 4
    assert plans[0][0] <= X.nbytes + 4 * 8 * width * len(X)


@pytest.mark.slow
def test_layers_made_regions_in_place_compile_for_every_length():
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)).double()
    model = torch.nn.Sequential(layers)
    expected, made = [], []
    for length in (4, 6):
        x = torch.linspace(-1, 1, length * 8, dtype=torch.float64).view(length, 8)
        expected += torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))
    remat_apply(model, layers="0", policy=checkpoint_policy(budget=0.4))
    run = compiled(model)
    for length in (4, 6):
        x = torch.linspace(-1, 1, length * 8, dtype=torch.float64).view(length, 8)
        made += torch.autograd.grad(run(x).sin().sum(), list(model.parameters()))
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_budget_of_dynamic_shapes_plans_around_numbers_that_dynamo_made_tensors_of():
    """LayerNorm.eps: nothing is warned of, and the plan is that of eager."""
    norm, weight = nn.LayerNorm(16), nn.Parameter(torch.randn(16, 16))
    block = remat(lambda x: torch.tanh(norm(x) @ weight).sin() * x, policy=HALF)
    run = torch.compile(lambda x: block(x).sum(), dynamic=True, backend="aot_eager")
    for rows in (8, 12):
        x = torch.randn(rows, 16, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            found = torch.autograd.grad(run(x), [x, norm.weight, weight])
        expected = torch.autograd.grad(block(x).sum(), [x, norm.weight, weight])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
