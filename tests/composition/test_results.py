"""Results of a region under torch.func that are no tensors and no pytrees: callables, objects, nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from remat import RematError, remat
from tests.helpers import TORCH

FUNC = torch.func
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_what_cannot_be_followed_is_refused_where_levels_nest() -> None:
    def generator(x: Tensor) -> Any:
        return (row.sin() for row in x)

    for fn, told in (
        (lambda x: torch.stack(list(remat(generator)(x))).sum(), "returns a generator"),
        (lambda x: remat(lambda x: {x.sin()})(x).pop().sum(), "where nothing can take its place"),
    ):
        torch.testing.assert_close(FUNC.grad(fn)(X), X.cos())
        with pytest.raises(RematError, match=told):
            FUNC.grad(lambda x, fn=fn: FUNC.grad(fn)(x).sum())(X)


def doubled(h: Tensor) -> Tensor:
    return h.mul_(3).sin()


def counted(h: Tensor) -> Tensor:
    total = torch.zeros(4, dtype=h.dtype)
    return remat(lambda h, total: (total.add_(h.mean(0)), h * total)[1])(h, total) * total


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "fn", [lambda wrap: lambda x: wrap(doubled)(x * 2), lambda wrap: counted], ids=["h", "total"]
)
def test_a_derivative_written_to_an_argument_is_kept_at_one_level_and_refused_where_they_nest(
    fn: Any, nested: bool
) -> None:
    grad, region = FUNC.grad, fn(remat)
    plain = fn(lambda f: f) if region is not counted else lambda x: x * x.mean(0) ** 2
    for _ in range(3):
        if not nested:
            torch.testing.assert_close(grad(lambda x: region(x).sum())(X), grad(lambda x: plain(x).sum())(X))
            continue
        with pytest.raises(RematError, match="writes what carries a derivative"):
            grad(lambda x: grad(lambda x: region(x).sum())(x).sum())(X)


def test_a_write_into_what_is_differentiated() -> None:
    def loss(r: Any) -> Any:
        def of(x: Tensor) -> Tensor:
            y = x * 1
            return (r(lambda x: x.mul_(2).sin())(y) * y).sum()

        return of

    for transform in (FUNC.grad, FUNC.hessian, FUNC.jacfwd):
        torch.testing.assert_close(transform(loss(remat))(X), transform(loss(lambda f: f))(X), rtol=0, atol=0)
    with pytest.raises(RematError, match="which is an argument that is differentiated"):
        loss(remat)(X.clone().requires_grad_())


class Turned(torch.autograd.Function):
    """What it is given, as gradient reversal of domain adaptation returns it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        return -grads[0]


def hooked(x):
    out = x.view(-1)
    out.register_hook(torch.neg)
    return (out,)


def hooked_argument(x):
    x.register_hook(torch.neg)
    return x, x.sin()


PARTS = [lambda x: (Turned.apply(x),), lambda x: Turned.apply(x[1:]).chunk(2), hooked, hooked_argument]


@pytest.mark.parametrize("fn", PARTS)
@pytest.mark.parametrize("way", ["trained", "nested", "compiled"])
def test_views_with_a_derivative_of_their_own(fn, way):
    """A result that looks into an argument, and is pulled back by code of the user's."""
    if TORCH < (2, 12) and (way, fn) == ("compiled", hooked_argument):
        pytest.skip("Dynamo of 2.11 refuses the hook there, in torch's checkpoint, too")
    x, w = torch.linspace(-1, 1, 5), torch.linspace(1, 2, 5).requires_grad_()

    def step(fn):
        loss = lambda x, w: torch.cat([(out * k).sin() for k, out in enumerate(fn(x * w), 1)]).sum()  # noqa: E731
        if way == "compiled":
            torch._dynamo.reset()
            compiled = torch.compile(lambda: loss(x, w), backend="aot_eager")
            return torch.autograd.grad(compiled(), w)[0]
        if way == "trained":
            return torch.func.grad(loss)(x, w)
        return torch.func.grad(lambda w: torch.func.grad(loss)(x, w).sum())(w.detach())

    torch.testing.assert_close(step(remat(fn)), step(fn))
