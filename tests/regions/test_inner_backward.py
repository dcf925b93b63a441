"""A backward pass inside a region: forces, gradient penalties, inner optimization steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import remat, save_matmuls, scan_remat
from tests.helpers import OpCounter, rand, same


def squares(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([t.square().sum() for t in tensors]).sum()


def force(x: Tensor, w: Tensor) -> Tensor:
    energy = ((x @ w).sin() * x).sum()
    (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    return slope * x.cos()


def results(fn: Callable[..., Tensor], calls: int = 3) -> list[Any]:
    """Values and gradients, first and second, of several calls: the later ones know of the first."""
    x, w = rand(3, 3).requires_grad_(), rand(3, 3, seed=1).requires_grad_()
    found = []
    for _ in range(calls):
        out = fn(x, w).sin().sum()
        first = torch.autograd.grad(out, (x, w), create_graph=True)
        second = torch.autograd.grad(squares(first), (x, w))
        found.append((out, *first, *second))
    return found


def test_a_known_one_costs_no_recomputation_in_the_forward() -> None:
    def fresh(x: Tensor, w: Tensor) -> Tensor:
        return force(x, w).sin()

    region = remat(fresh)
    x, w = rand(3, 3).requires_grad_(), rand(3, 3, seed=1).requires_grad_()
    counts = []
    for fn in (fresh, region, region):
        with OpCounter() as forward:
            fn(x, w)
        counts.append(forward["mm"])
    plain, first, later = counts
    assert first > plain
    assert later == plain


def test_after_a_failure_inside_the_next_call_works() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        out = force(x, w)
        if fails:
            raise KeyError("user's")
        return out

    region = remat(fn)
    for fails in (True, True):  # noqa: B007 (read by fn)
        with pytest.raises(KeyError, match="user's"):
            results(region, 1)
    fails = False
    torch.testing.assert_close(results(region, 2), results(fn, 2), rtol=0, atol=1e-12)


def pulled(x, w):
    """A step down an energy, whose gradient is one of tensors of its own."""
    with torch.enable_grad():
        own, unread = x.detach().requires_grad_(), torch.ones(4, dtype=x.dtype, requires_grad=True)
        energy = (own @ w.detach()).square().sum()
        down, zero = torch.autograd.grad(energy, (own, unread), materialize_grads=True)
    return torch.tanh(x @ w - 0.1 * down + zero)


@pytest.mark.parametrize("around", ["", "region", "scan"])
def test_under_torch_func_a_function_may_differentiate_on_its_own(around):
    w, x = rand(4, 4), rand(3, 4)
    down = 2 * (x @ w) @ w.T  # torch.func refuses requires_grad_ without a region
    expected = torch.func.grad(lambda x: torch.tanh(x @ w - 0.1 * down).square().sum())(x)
    region = remat(lambda x: pulled(x, w))
    ways = {
        "": region,
        "region": remat(lambda x: region(x) * 1),
        "scan": lambda x: scan_remat(lambda h, _: (pulled(h, w), None), x, length=1, policy=save_matmuls)[0],
    }
    for _ in range(2):
        same(torch.func.grad(lambda x: ways[around](x).square().sum())(x), expected)


def replaced_before(x: Tensor, w: Tensor) -> Tensor:
    t = x @ w
    t.data = t.data.sin()
    return force(x, w) * t


def replaced_between(x: Tensor, w: Tensor) -> Tensor:
    energy = (x @ w).sin().exp()
    t = energy * 2
    t.data = t.data.sin()
    (slope,) = torch.autograd.grad((energy * t).sum(), x, create_graph=True)
    return slope * x.cos()


def argument_replaced_between(x: Tensor, w: Tensor) -> Tensor:
    inner, other = x.detach().requires_grad_(), torch.zeros(3, 3, dtype=x.dtype)
    energy = (inner @ w.detach() + other).sin().exp()
    other.data = inner.data.cos()
    (slope,) = torch.autograd.grad((energy * other).sum(), inner)
    return (slope * x @ w).sin()


@pytest.mark.parametrize("policy", [None, save_matmuls], ids=["nothing", "matmuls"])
@pytest.mark.parametrize("fn", [replaced_before, replaced_between, argument_replaced_between])
def test_beside_what_ops_do_not_tell(fn: Callable[..., Tensor], policy: Any) -> None:
    def fresh(x: Tensor, w: Tensor) -> Tensor:
        return fn(x, w).exp()

    same(results(remat(fresh, policy=policy)), results(fresh))
