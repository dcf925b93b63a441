"""A result that no tangent reaches has none, so that ops follow which take no tangents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from remat import remat, save_matmuls, save_nothing
from tests.helpers import crossed, rand, same

Function = Callable[..., Any]
SPARSE = (torch.eye(4, dtype=torch.float64) + torch.ones(4, 4, dtype=torch.float64).tril()).to_sparse()


def by_out(t: Tensor) -> Tensor:
    made = torch.empty(t.shape, dtype=t.dtype)
    with torch.no_grad():
        torch.sin(t, out=made)
    return t * made


def by_a_sparse_product(t: Tensor) -> Tensor:
    return torch.sparse.mm(SPARSE, t.t().sin()).t().contiguous()


def beside_one_that_moves(x: Tensor, y: Tensor, w: Tensor, wrap: Function, follows: Function) -> Tensor:
    still, moves = wrap(lambda a: (y * torch.sin(y), (a @ w).sin()))(x)
    return follows(still) * moves


def of_a_captured_tensor(x: Tensor, y: Tensor, w: Tensor, wrap: Function, follows: Function) -> Tensor:
    still = wrap(lambda: (x * 1, y * torch.sin(y @ w))[1])()
    return (follows(still).tanh() * x).logsumexp(1, keepdim=True)


def of_a_region_inside(x: Tensor, y: Tensor, w: Tensor, wrap: Function, follows: Function) -> Tensor:
    def around(a: Tensor, b: Tensor) -> Any:
        still = wrap(lambda a, b: (a.sin(), b.cos() @ w))(a, b)[1]
        return follows(still) * a

    return wrap(around)(x, y)


def of_the_first_of_two_layers(x: Tensor, y: Tensor, w: Tensor, wrap: Function, follows: Function) -> Tensor:
    layer = wrap(lambda a, b: ((a @ w).sin(), b * 2))
    a, b = layer(x, y)
    return layer(a, follows(b))[0] * follows(b)


PROGRAMS = [beside_one_that_moves, of_a_captured_tensor, of_a_region_inside, of_the_first_of_two_layers]


def plain_over_jvp(f: Function, x: Tensor, y: Tensor, w: Tensor) -> Any:
    out, tangent, *_ = jvp(lambda x: f(x, y, w), (x,), (x.detach().cos(),))
    first = torch.autograd.grad(out.sum() + tangent.square().sum(), [x, y, w], create_graph=True)
    second = torch.stack([g.square().sum() for g in first]).sum()
    return [out, tangent, *first, *torch.autograd.grad(second, [x, y, w])]


def jvp_of_grad(f: Function, x: Tensor, y: Tensor, w: Tensor) -> Any:
    return jvp(lambda y: grad(lambda x: f(x, y.detach(), w).sum())(x.detach()), (y.detach(),), (y.detach(),))


def dual_level(f: Function, x: Tensor, y: Tensor, w: Tensor) -> Any:
    with forward_ad.dual_level():
        out = f(forward_ad.make_dual(x, x.detach().cos()), y, w)
        primal, tangent = forward_ad.unpack_dual(out)
        first = torch.autograd.grad(primal.sum(), [y, w], create_graph=True)
    return [primal, tangent, *first]


def batched_jvp(f: Function, x: Tensor, y: Tensor, w: Tensor) -> Any:
    push = lambda v: jvp(lambda x: f(x, y, w), (x,), (v,))[1]  # noqa: E731
    out = vmap(push)(torch.stack([x, x.flip(0)]).detach())
    return [out, *torch.autograd.grad(out.square().sum(), [x, y, w])]


WAYS = [plain_over_jvp, jvp_of_grad, dual_level, batched_jvp]


@pytest.mark.parametrize(
    ("program", "way", "follows", "policy"),
    crossed(PROGRAMS, WAYS, [by_out, by_a_sparse_product], [save_nothing, save_matmuls]),
)
def test_a_result_that_no_tangent_reaches(program: Any, way: Any, follows: Any, policy: Any) -> None:
    def run(wrap: Function) -> Any:
        x, y, w = (rand(4, 4, seed=seed).requires_grad_() for seed in range(3))
        return [way(lambda x, y, w: program(x, y, w, wrap, follows), x, y, w) for _ in range(2)]

    try:
        want = run(lambda fn: fn)
    except RuntimeError as error:
        pytest.skip(f"torch refuses: {str(error)[:60]}")
    same(run(lambda fn: remat(fn, policy=policy)), want)
