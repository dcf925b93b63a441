"""Caches that a first call fills (masks, rotary tables), where the function runs a second time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

from remat import RematError, remat, save_matmuls, save_nothing
from tests.helpers import crossed, rand, same, unseen

D = torch.float64


def table(rows: int) -> torch.Tensor:
    return torch.outer(torch.arange(rows, dtype=D), 1 / 10 ** torch.arange(0, 2, dtype=D)).cos()


def a_written_mask():
    cache: list[Any] = []

    def fn(x):
        if not cache:
            cache.append(
                torch.full(x.shape, -1.0, dtype=D).triu_(1).masked_fill_(torch.ones(x.shape) > 2, 0.5)
            )
        return (x + cache[0]).exp() * x

    return fn


class Tables(dict[int, Any]):
    def same(self, x):
        return x


def read_by_a_region_inside():
    tables = Tables()

    def fn(x):
        remat(tables.same)(x)  # what its method belongs to leads to the cache
        return (x * tables.setdefault(len(x), table(len(x)))).sin() * x

    return fn


def of_the_first_batch():
    cache: dict[str, Any] = {}
    return lambda x: (x * cache.setdefault("scale", x.detach().mean(0).cos())).sin() * x


def filled_by_a_region_inside():
    cache: dict[int, Any] = {}

    def inner(x, scale):
        return (x * cache.setdefault(len(x), table(len(x))) * scale).sin()

    return lambda x: remat(inner)(x, x.cos()) * remat(inner)(x.sin(), x)


CACHES = [
    a_written_mask,
    read_by_a_region_inside,
    filled_by_a_region_inside,
]


def total(fn):
    return lambda x: fn(x).sum()


def plainly(fn):
    x = rand(3, 2).requires_grad_()
    return torch.autograd.grad(total(fn)(x), x)[0]


WAYS = {
    "grad": lambda fn: grad(total(fn))(rand(3, 2)),
    "vmap of grad": lambda fn: vmap(grad(total(fn)))(rand(2, 3, 2)),
    "hessian": lambda fn: hessian(total(fn))(rand(3, 2)),
    "grad of grad": lambda fn: grad(lambda x: grad(total(fn))(x).square().sum())(rand(3, 2)),
    "a raw kernel beside it": lambda fn: plainly(fn),
}


@pytest.mark.parametrize(("make", "way", "policy"), crossed(CACHES, WAYS, [save_nothing, save_matmuls]))
def test_a_cache_that_the_forward_fills(make, way, policy):
    """Call after call: torch alone fails in the second hessian, as it takes off one wrapper of two."""

    def beside(fn):
        return (lambda x: fn(x) * (x + unseen(x, 0.5)).tanh()) if way.startswith("a raw") else fn

    want, region = WAYS[way](beside(make())), remat(beside(make()), policy=policy)
    for _ in range(1 if way == "hessian" else 2):
        same(WAYS[way](region), want)


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=repr)
@pytest.mark.parametrize("way", ["grad", "a raw kernel beside it"])
def test_what_is_made_of_the_first_batch(way, policy):
    """A second run makes it anew, and reads the first. (A vmap is gone by the second call, in torch, too.)"""
    plain, fn = of_the_first_batch(), of_the_first_batch()
    region = remat((lambda x: fn(x) * (x + unseen(x, 0.5)).tanh()) if "raw" in way else fn, policy=policy)
    want = WAYS[way]((lambda x: plain(x) * (x + 0.5).tanh()) if "raw" in way else plain)
    for _ in range(2):
        same(WAYS[way](region), want)


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
