"""Caches that a first call fills (masks, rotary tables), where the function runs a second time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad, hessian

from remat import RematError, remat
from tests.helpers import rand, same, unseen

D = torch.float64


def table(rows: int) -> torch.Tensor:
    return torch.outer(torch.arange(rows, dtype=D), 1 / 10 ** torch.arange(0, 2, dtype=D)).cos()


def total(fn):
    return lambda x: fn(x).sum()


WAYS = {
    "grad": lambda fn: grad(total(fn))(rand(3, 2)),
    "hessian": lambda fn: hessian(total(fn))(rand(3, 2)),
    "grad of grad": lambda fn: grad(lambda x: grad(total(fn))(x).square().sum())(rand(3, 2)),
}


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
