"""Derivatives by one argument of derivatives by another: they say which ops a matmul comes down to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vjp, vmap

from remat import remat, save_matmuls, save_nothing
from tests.helpers import crossed, rand, same

Loss = Callable[..., Tensor]


def product(x: Tensor, w: Tensor) -> Tensor:
    """Of a batch that lies otherwise in memory: copied or not, by whether the weight is differentiated."""
    return (x.transpose(0, 1) @ w).sin()


def summed(pair: Any) -> Tensor:
    return pair[0].square().sum() + pair[1]


def w_of_x(loss: Loss, x: Tensor, w: Tensor) -> Tensor:
    return grad(lambda w: grad(loss)(x, w).square().sum())(w)


def x_of_w(loss: Loss, x: Tensor, w: Tensor) -> Tensor:
    return grad(lambda x: grad(loss, 1)(x, w).square().sum())(x)


def w_of_both(loss: Loss, x: Tensor, w: Tensor) -> Tensor:
    return grad(lambda w: summed(grad_and_value(loss)(x, w)))(w)


def x_of_both(loss: Loss, x: Tensor, w: Tensor) -> Tensor:
    return grad(lambda x: summed(grad_and_value(loss, 1)(x, w)))(x)


def third(loss: Loss, x: Tensor, w: Tensor) -> Tensor:
    return grad(lambda v: x_of_w(loss, x, w + v).square().sum())(w)


def pulled_outside(loss: Loss, x: Tensor, w: Tensor) -> Tensor:
    def of(w: Tensor) -> Tensor:
        pull: Any = vjp(lambda x: loss(x, w), x)[1]
        return pull(torch.tensor(2.0))[0].square().sum()

    return grad(of)(w)


def pushed(loss: Loss, x: Tensor, w: Tensor) -> Tensor:
    made: Any = jvp(lambda w: grad(loss)(x, w), (w,), (w.cos(),))
    return made[1]


def plain_over_both(loss: Loss, x: Tensor, w: Tensor) -> Tensor:
    weight = w.detach().requires_grad_()
    return torch.autograd.grad(summed(grad_and_value(loss)(x, weight)), weight)[0]


ORDERS = [w_of_x, x_of_w, w_of_both, x_of_both, third, pulled_outside, pushed]


def with_policies(body: Any, run: Callable[[Loss], Tensor]) -> None:
    expected = run(lambda x, w: body(x, w).square().sum())
    for policy in (save_nothing, save_matmuls):
        region = remat(body, policy=policy)
        for _ in range(2):
            same(run(lambda x, w, region=region: region(x, w).square().sum()), expected)


@pytest.mark.parametrize("order", [*ORDERS, plain_over_both])
def test_products(order):
    x, w = rand(3, 2, 4), rand(4, 4)
    with_policies(product, lambda loss: order(loss, x, w))


@pytest.mark.parametrize("order", ORDERS)
def test_products_of_batches(order):
    xs, w = rand(2, 3, 2, 4), rand(4, 4)
    with_policies(product, lambda loss: vmap(lambda x: order(loss, x, w))(xs))


LIES = {"turned": lambda x: x.t().sin().contiguous().t(), "as usual": Tensor.sin}
USES = {"linear": torch.nn.functional.linear, "matmul": torch.matmul}


@pytest.mark.parametrize(("lies", "use", "nested"), crossed(LIES, USES, [False, True], every=2))
def test_batches_beside_a_weight_that_plain_autograd_differentiates(lies, use, nested):
    """What is computed of the weight inside requires gradients in the forward, whoever asks for them."""
    xs, w = rand(2, 3, 4), rand(4, 4).requires_grad_()

    def body(x: Tensor, w: Tensor) -> Tensor:
        return USES[use](LIES[lies](x), w.cos())

    def run(loss: Loss) -> Tensor:
        if nested:
            inner = loss
            loss = lambda x, w: remat(inner)(x, w)  # noqa: E731
        of_one = vmap(grad(lambda x: loss(x, w)))(xs)
        (of_weight,) = torch.autograd.grad(of_one.square().sum(), w)
        return of_one.detach().sum(0) + of_weight.sum()

    with_policies(body, run)
