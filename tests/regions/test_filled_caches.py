"""Caches that a first call fills (masks, rotary tables), where the function runs a second time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jvp

from remat import RematError, remat
from tests.helpers import rand, same, unseen

D = torch.float64


def table(rows: int) -> torch.Tensor:
    return torch.outer(torch.arange(rows, dtype=D), 1 / 10 ** torch.arange(0, 2, dtype=D)).cos()


def total(fn):
    return lambda x: fn(x).sum()


def plainly(fn):
    x = rand(3, 2).requires_grad_()
    return torch.autograd.grad(total(fn)(x), x)[0]


WAYS = {
    "grad": lambda fn: grad(total(fn))(rand(3, 2)),
    "hessian": lambda fn: hessian(total(fn))(rand(3, 2)),
    "grad of grad": lambda fn: grad(lambda x: grad(total(fn))(x).square().sum())(rand(3, 2)),
}


class Filling(torch.nn.Module):
    """Two regions read a table that the first has made; a third, which uses torch.func, holds a result."""

    def __init__(self, region):
        super().__init__()
        self.region, self.tables, self.lin = region, dict[int, Any](), torch.nn.Linear(2, 2).to(D)

    def scaled(self, x):
        if len(x) not in self.tables:
            self.tables[len(x)] = table(len(x)).float()
        return self.tables[len(x)].to(D) * x

    def whole(self, x):
        scaled = self.region(self.scaled)(self.region(self.scaled)(x))

        def last(a):
            torch.func.grad(lambda t: self.lin(t).sum())(a).mul(a)
            return scaled

        return self.region(last)(x)

    def forward(self, x):
        return self.region(self.whole)(x)


def test_a_table_that_is_there_as_several_tensors():
    """Regions inside take aliases of what they read."""
    torch.manual_seed(0)
    model = Filling(remat)
    for _ in range(2):
        model.tables.clear()
        same(plainly(model), plainly(lambda x: x * table(3).float().to(D).square()))


def another_table():
    cache: list[Any] = []

    def fn(x):
        if cache:
            return (x * cache[0]).sin()
        cache.append(torch.full_like(x, 2.0))
        return (x * torch.full(x.shape, 3.0, dtype=D)).sin()

    return fn


def overwritten():
    cache: list[Any] = []

    def fn(x):
        if not cache:
            cache.append(torch.full(x.shape, 2.0, dtype=D))
        return (x * cache[0]).sin()

    fn.cache = cache  # pyright: ignore[reportFunctionMemberAccess]
    return fn


def test_a_table_that_is_another_one_in_the_second_run_is_told():
    with pytest.raises(RematError, match="does not repeat its forward"):
        WAYS["grad of grad"](remat(another_table()))
    for way in ("hessian", "grad"):
        same(WAYS[way](remat(another_table())), WAYS[way](another_table()))


def test_a_table_that_is_overwritten_before_the_backward_is_told():
    fn = overwritten()
    x = rand(3, 2).requires_grad_()
    out = remat(lambda x: fn(x) * (x + unseen(x, 0.5)).tanh())(x).sum()
    fn.cache[0].add_(1)
    with pytest.raises(RematError):
        torch.autograd.grad(out, x)


def test_a_table_in_the_wrapper_of_a_level_that_is_gone():
    """The next region finds it in its cache."""
    cache: dict[int, Any] = {}
    x, y = rand(3, 2), rand(3, 2)

    def loss(x):
        remat(lambda a, b: a * cache.setdefault(len(x), table(len(x))) * b)(y, x)
        return remat(lambda b: b.sin() * len(cache))(y).sum() + x.sin().sum()

    same(jvp(grad(loss), (x,), (x,))[1], -x.sin() * x)
