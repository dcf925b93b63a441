"""Third derivatives of regions in each other, whose inner ones capture what the outer ones are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp

from remat import remat, save_matmuls
from tests.helpers import crossed

X = torch.linspace(-1, 2, 4, dtype=torch.float64)
Y = X.flip(0).cos()
Wrap = Callable[[Any], Any]


def op(t: Tensor) -> Tensor:
    return t.sin() * t


FUNCTIONS: dict[str, Callable[[Wrap], Callable[[Tensor], Tensor]]] = {
    "only captured": lambda r: lambda x: r(lambda a: r(lambda: op(a))())(x).sum(),
    "captured and given": lambda r: lambda x: r(lambda a, b: r(lambda b: op(a) * b)(b))(x, Y).sum(),
    "captured results": lambda r: lambda x: r(lambda a, b: r(lambda b: op(a.cos()))(b))(x, Y).sum(),
    "given": lambda r: lambda x: r(lambda a, b: r(lambda b, a: op(a) * b)(b, a))(x, Y).sum(),
    "three": lambda r: lambda x: r(lambda a: r(lambda b: r(lambda c: op(a) + op(b) * c)(b))(a * 2))(x).sum(),
    "a gradient inside": lambda r: (
        lambda x: grad(lambda a: r(lambda a: r(lambda: op(a))())(a).sum())(x).sum()
    ),
}


def square(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).square().sum()


def plainly(f: Callable[[Tensor], Tensor]) -> Tensor:
    x = X.clone().requires_grad_()
    value = f(x)
    for _ in range(2):
        value = torch.autograd.grad(value, x, create_graph=True)[0].square().sum()
    return torch.autograd.grad(value, x)[0]


ORDERS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad grad grad": lambda f: grad(square(grad(square(grad(f)))))(X),
    "four": lambda f: grad(square(grad(square(grad(square(grad(f)))))))(X),
    "hessian grad": lambda f: hessian(square(grad(f)))(X),
    "jacrev": lambda f: jacrev(jacrev(jacrev(f)))(X),
    "jacfwd": lambda f: jacfwd(jacfwd(jacrev(f)))(X),
    "jvp": lambda f: jvp(grad(square(grad(f))), (X,), (Y,))[1],
    "plain autograd": plainly,
}


@pytest.mark.parametrize(
    ("function", "order", "policy"), crossed(FUNCTIONS, ORDERS, [None, save_matmuls], every=4)
)
def test_third_derivatives(function: str, order: str, policy: Any) -> None:
    make, differentiate = FUNCTIONS[function], ORDERS[order]
    region = remat if policy is None else lambda f: remat(f, policy=policy)
    torch.testing.assert_close(differentiate(make(region)), differentiate(make(lambda f: f)))
