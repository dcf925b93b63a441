"""Planning looks and leaves no trace: state, caches, hooks, random numbers and autocast are as they were."""

import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from remat import checkpoint_policy, remat
from remat.plan import BudgetPolicy, pareto, plan_chain, plan_model
from remat.transforms import RematError
from remat.transforms.compat import is_fake
from tests.helpers import crossed
from tests.stateful import MODULES, X, same

POLICY = BudgetPolicy(0.5)


def through(module):
    region = remat(module, policy=POLICY)
    return lambda x: region(x).sum()


LOOKS = {
    "plan": lambda module: POLICY.plan(module, X),
    "bind": lambda module: POLICY.bind(module, (X,), {}),
    "plan of a closure": lambda module: POLICY.plan(lambda x: module(x), X),
    "plan_model": lambda module: plan_model(through(module), X, budget=0.5),
    "pareto": lambda module: pareto(module, X, points=2, torch_solvers=()),
    "plan_chain": lambda module: plan_chain([module, module], X, peak="1GiB"),
    "peak": lambda module: BudgetPolicy(1.0, peak=1 << 30).plan(module, X),
}


@pytest.mark.parametrize(("look", "kind"), crossed(LOOKS, MODULES))
def test_a_look_leaves_everything_as_it_was(kind, look):
    module = kind()
    before = module.seen()
    LOOKS[look](module)
    assert same(module.seen(), before)


@pytest.mark.parametrize("kind", MODULES)
def test_under_a_budget_a_step_does_what_it_does_without(kind):
    def run(policy):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        module = kind()
        fn = module if policy is None else remat(module, policy=policy)
        found = []
        for _ in range(2):
            out = fn(X)
            found += [out.detach(), *torch.autograd.grad(out.sum(), (X, module.layer.weight))]
        return found, module(X).detach()

    plain, planned = run(None), run(checkpoint_policy(budget=0.5))
    assert same(planned, plain)


def test_autocast_casts_the_same_and_remembers_no_cast_of_a_plan():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    tied = lambda x: layer(layer(x).relu()).sin()  # noqa: E731
    region = remat(tied, policy=checkpoint_policy(budget=0.5))
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            out, plain = region(X), tied(X)
            assert not is_fake(out) and torch.equal(out, plain)
    gradients = torch.autograd.grad(out.sum(), (X, layer.weight))
    assert same(gradients, torch.autograd.grad(plain.sum(), (X, layer.weight)))


@pytest.mark.filterwarnings("error")
def test_autocast_inside_a_function_too():
    layer = nn.Linear(4, 4)

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            x = layer(layer(x))
        with torch.autocast("cpu", enabled=False):
            return layer(x.float()).sin()

    region = remat(fn, policy=checkpoint_policy(budget=0.3))
    for _ in range(2):
        assert torch.equal(region(X), fn(X))


def test_a_hidden_cache_that_keeps_a_fake_is_named():
    class Opaque(dict): ...

    hidden = Opaque()
    module = types.ModuleType("logging")
    exec("held = None\ndef keep(x):\n    held['mask'] = x\n    return x", vars(module))
    module.held = hidden  # pyright: ignore[reportAttributeAccessIssue]
    fn = lambda x: module.keep(x.sin()).exp()  # noqa: E731
    with pytest.raises(RematError, match="left a tensor without data in .*'mask'"):
        POLICY.plan(fn, X)
    assert "mask" not in hidden
