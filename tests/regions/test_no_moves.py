"""Forwards that set tensors to the data that they have, and weights that a context of torch's has cached."""

# Modules in modules are looked up by name.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import remat
from remat import checkpoint_policy
from tests.helpers import same

MOVES = {
    "to": lambda m, x: m.to(x),
    "float": lambda m, x: m.float(),
    "cpu": lambda m, x: m.cpu(),
    "data": lambda m, x: setattr(m.w, "data", m.w.data),
    "detached": lambda m, x: setattr(m.w, "data", m.w.detach()),
}


class Cached(nn.Module):
    def __init__(self, move):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.move, self.cache, self.runs = nn.Parameter(torch.randn(4, 4)), move, None, 0

    def forward(self, x):
        self.runs += 1
        MOVES[self.move](self, x)
        if self.cache is None:
            self.cache = torch.linalg.inv(self.w @ self.w.T + 1).detach()
        return torch.tanh(x @ self.cache) @ self.w


@pytest.mark.parametrize("move", MOVES)
def test_a_move_to_the_same_place_is_none(move):
    plain, module = Cached(move), Cached(move)
    region, x = remat.remat(module), torch.ones(3, 4, requires_grad=True)
    for _ in range(3):
        want = torch.autograd.grad(plain(x).sum(), [x, plain.w])
        same(torch.autograd.grad(region(x).sum(), [x, module.w]), want)
    assert module.runs == plain.runs == 3


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


@pytest.mark.filterwarnings("ignore:A budget")
@pytest.mark.parametrize("budget", ["free", 0.4])
def test_a_budget_is_planned_where_weights_are_cached(budget):
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    model, x = nn.Sequential(layer, nn.Tanh(), layer), torch.randn(3, 4)
    leaf = layer.parametrizations.weight.original

    def step(f):
        with parametrize.cached():
            return torch.autograd.grad((f(x) + f(2 * x)).square().sum(), leaf)

    want, region = step(model), remat.remat(model, policy=checkpoint_policy(budget=budget))
    for _ in range(3):
        same(step(region), want, 1e-5)
    assert not parametrize._cache
