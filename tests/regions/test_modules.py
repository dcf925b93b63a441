"""Modules, methods and hooks."""

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad

from remat import remat
from tests.helpers import POLICIES, rand, same


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("policy", ["nothing", "matmuls"])
def test_methods_in_a_class_body(policy):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        @remat(policy=POLICIES[policy])
        def forward(self, x, scale=1.0):
            """Doubled."""
            return self.body(x) * scale

    model, x = Model(), rand(2, 3)
    same(model(x, scale=2.0), model.body(x) * 2.0, 0.0)
    got = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    same(got, torch.autograd.grad(model.body(x).square().sum(), list(model.parameters())))
    assert Model.forward.__doc__ == "Doubled." and list(inspect.signature(model.forward).parameters) == [
        "x",
        "scale",
    ]


def test_signature_name_and_document_are_kept():
    def block(x: torch.Tensor, *, flag: bool = False) -> torch.Tensor:
        """A block."""
        return x

    region = remat(block)
    assert region.__name__ == "block" and region.__doc__ == "A block." and region.__wrapped__ is block  # pyright: ignore
    assert inspect.signature(region) == inspect.signature(block)


def test_forms_of_the_decorator():
    fn = lambda x: x.sin().exp()  # noqa: E731
    x = rand(3)
    for region in (
        remat(fn),
        remat(fn, policy=POLICIES["matmuls"]),
        remat(policy=POLICIES["nothing"])(fn),
        remat()(fn),
        remat(functools.partial(fn)),
        remat(name="block")(fn),
    ):
        same(grad(lambda x: region(x).sum())(x), grad(lambda x: fn(x).sum())(x))  # noqa: B023


def test_static_and_class_methods():
    class Math:
        factor = 2.0

        @staticmethod
        @remat
        def static(x):
            return x.sin()

        @classmethod
        @remat
        def of_class(cls, x):
            return x.sin() * cls.factor

    x = rand(3)
    same(grad(lambda x: Math.static(x).sum() + Math().of_class(x).sum())(x), x.cos() * 3)  # pyright: ignore


def test_hooks_on_parameters_and_outputs():
    def run(wrap):
        model, x, order = mlp(), rand(2, 3), []
        model[0].weight.register_hook(lambda g: g * 2)
        model[0].weight.register_post_accumulate_grad_hook(lambda p: order.append("accumulated"))
        out = wrap(model)(x)
        out.register_hook(lambda g: (order.append("output"), g * 3)[1])
        out.retain_grad()
        out.sum().backward()
        return (out.grad, [p.grad for p in model.parameters()]), order

    got, expected = run(remat), run(lambda m: m)
    same(got[0], expected[0])
    assert got[1] == expected[1] == ["output", "accumulated"]
