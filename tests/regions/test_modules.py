"""Modules, methods and hooks."""

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from remat import remat
from tests.helpers import POLICIES, rand, same


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("policy", POLICIES)
def test_module_as_region(policy):
    def run(wrap):
        model, x = mlp(), rand(2, 3).requires_grad_()
        out = wrap(model)(x)
        out.square().sum().backward()
        return out, x.grad, [p.grad for p in model.parameters()]

    same(run(lambda m: remat(m, policy=POLICIES[policy])), run(lambda m: m))


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


@pytest.mark.parametrize("policy", ["nothing", "matmuls", "rule"])
def test_functional_call_and_per_sample_gradients(policy):
    model = mlp()
    region = remat(lambda params, x: functional_call(model, params, (x,)), policy=POLICIES[policy])
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(fn):
        return lambda params, x: fn(params, x).square().sum()

    expected = vmap(grad(loss(lambda params, x: functional_call(model, params, (x,)))), (None, 0))(
        params, rand(4, 3)
    )
    same(vmap(grad(loss(region)), (None, 0))(params, rand(4, 3)), expected)


def test_region_around_a_module_under_functional_call():
    model = mlp()

    class Outer(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.body, self.wrap = model, wrap

        def forward(self, x):
            return self.wrap(self.body)(x)

    params = {"body." + name: p.detach() * 2 for name, p in model.named_parameters()}

    def gradients(wrap):
        outer = Outer(wrap)
        return grad(lambda p: functional_call(outer, p, (rand(2, 3),)).square().sum())(params)

    same(gradients(remat), gradients(lambda m: m))


def test_module_hooks_run_as_without_remat():
    def run(wrap):
        model, x, seen = mlp(), rand(2, 3).requires_grad_(), []
        layer = model[0]
        layer.register_forward_pre_hook(lambda m, args: seen.append("pre"))
        layer.register_forward_hook(lambda m, args, out: torch.mul(out, 2))  # type: ignore[arg-type]
        layer.register_full_backward_hook(lambda m, gin, gout: (gin[0] * 3,) if gin[0] is not None else None)
        out = wrap(model)(x)
        out.sum().backward()
        return (out, x.grad, [p.grad for p in model.parameters()]), seen

    expected, _ = run(lambda m: m)
    got, seen = run(remat)
    same(got, expected)
    # In the forward alone: a recomputation runs ops.
    assert seen == ["pre"]


def test_tensor_hooks_run_once_and_change_the_gradient():
    def run(wrap):
        calls = []

        def region(x):
            h = x.sin()
            if h.requires_grad:
                h.register_hook(lambda g: (calls.append(1), g * 2)[1])
            return h.exp()

        x = rand(3).requires_grad_()
        wrap(region)(x).sum().backward()
        return x.grad, len(calls)

    assert run(remat)[1] == run(lambda f: f)[1] == 1
    same(run(remat)[0], run(lambda f: f)[0])


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


def test_frozen_parameters_get_no_gradient():
    model = mlp()
    model[0].requires_grad_(False)
    remat(model)(rand(2, 3)).sum().backward()  # pyright: ignore
    assert model[0].weight.grad is None and model[2].weight.grad is not None


def test_batch_norm_in_training_updates_its_statistics_once():
    def run(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
        wrap(model)(rand(5, 3)).square().sum().backward()
        return [p.grad for p in model.parameters()], dict(model.named_buffers())

    got, expected = run(remat), run(lambda m: m)
    same(got, expected)
