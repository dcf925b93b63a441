"""A torch-function mode of the user's is asked what it is asked without regions and scans, about a custom
`autograd.Function`, too: at a level of torch.func as a whole, in plain autograd about what that calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.overrides import TorchFunctionMode

from remat import remat, scan_remat
from tests.helpers import crossed, rand


class Told(TorchFunctionMode):
    """Notes what it is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Sin(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct * torch.sin(ctx.saved_tensors[0] + 0.3)


class Pushed(Sin):
    """The same with rules of its own."""

    generate_vmap_rule = False

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * ctx.saved_tensors[0].sin()

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> Any:
        return Pushed.apply(x), dims[0]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "generated": lambda x: Sin.apply(x) * x,
    "own rules": lambda x: Pushed.apply(x.sin()).cos(),
    "nested": lambda x: Pushed.apply(Sin.apply(x).tanh()),
}


def total(fn: Any) -> Any:
    return lambda x: fn(x).sum()


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def twice(fn: Any, x: Tensor) -> Tensor:
    y = leaf(x)
    (first,) = torch.autograd.grad(fn(y).sum(), y, create_graph=True)
    return torch.autograd.grad(first.sum(), y)[0]


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "backward": lambda fn, x: torch.autograd.grad(fn(y := leaf(x)).sum(), y)[0],
    "twice": twice,
    "grad": lambda fn, x: grad(total(fn))(x),
    "vmap of grad": lambda fn, x: vmap(grad(total(fn)))(x),
    "jvp": lambda fn, x: jvp(fn, (x,), (x,))[1],
    "vjp": lambda fn, x: vjp(fn, x)[1](x)[0],
    "grad of grad": lambda fn, x: grad(total(grad(total(fn))))(x),
    "backward of grad": lambda fn, x: torch.autograd.grad(grad(total(fn))(y := leaf(x)).sum(), y)[0],
}


def scanned(fn: Any) -> Any:
    return lambda x: scan_remat(lambda h, _: (fn(h), None), x, length=2, checkpoints=1)[0]


WITH: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "region": (1, remat),
    "region in a region": (1, lambda fn: remat(lambda x: remat(fn)(x))),
    "scan": (2, scanned),
    "scan in a region": (2, lambda fn: remat(scanned(fn))),
}


@pytest.mark.parametrize("way", ["backward", "grad", "vmap of grad", "vjp"])
@pytest.mark.parametrize("function", ["generated", "own rules", "nested"])
def test_a_mode_is_told_the_same(function: str, way: str) -> None:
    fn, x = FUNCTIONS[function], rand(3, 4)
    with Told() as without:
        WAYS[way](fn, x)
    region = remat(fn)
    for _ in range(2):
        with Told() as told:
            WAYS[way](region, x)
        assert told.names == without.names


@pytest.mark.parametrize(
    ("way", "name"), crossed(["twice", "grad of grad", "backward of grad", "jvp"], WITH, every=2)
)
def test_a_mode_is_told_nothing_of_the_engine(way: str, name: str) -> None:
    """Where the function runs again the mode is asked again, about what the user calls."""
    times, make = WITH[name]
    x, fn = rand(3, 4), FUNCTIONS["own rules"]
    with Told() as without:
        WAYS[way](fn if times == 1 else lambda x: fn(fn(x)), x)
    made = make(fn)
    for _ in range(2):
        with Told() as told:
            WAYS[way](made, x)
        assert set(told.names) <= set(without.names)
        assert told.names.count("custom_function_call") >= without.names.count("custom_function_call")
