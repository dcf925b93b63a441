"""Steps see the torch-function modes of the call, under transforms and in recomputations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, linearize, vjp, vmap
from torch.overrides import TorchFunctionMode

from remat import remat, scan_remat, while_remat
from tests.helpers import crossed, rand
from tests.ways import Changes

SEEN: list[str] = []


def step(h: Tensor) -> Tensor:
    SEEN.append(torch.empty(0).device.type)
    return h.sin()


def scanned(x: Tensor) -> Tensor:
    return scan_remat(lambda h, _: (step(h), None), x, length=2, checkpoints=1)[0]


def looped(x: Tensor) -> Tensor:
    """Its counter is a number: nothing of it is on any device."""
    more, body = (lambda c: c[1] < 2), (lambda c: (step(c[0]), c[1] + 1))
    return while_remat(more, body, (x, 0), checkpoints=2, max_steps=5)[0]


def counted(x: Tensor) -> Tensor:
    more, body = (lambda c: c[1] < 2), (lambda c: (step(c[0]), c[1] + 1))
    return while_remat(more, body, (x, torch.tensor(0, device="cpu")), checkpoints=2, max_steps=5)[0]


def plain(x: Tensor) -> Tensor:
    return x.sin().sin()


FUNCTIONS = {"scan": scanned, "numbers": looped, "loop": counted, "region": remat(scanned)}


def total(fn: Any) -> Any:
    return lambda x: fn(x).sum()


WAYS = {
    "backward": lambda fn, x: torch.autograd.grad(fn(y := x.clone().requires_grad_()).sum(), y)[0],
    "grad": lambda fn, x: grad(total(fn))(x),
    "vmap": lambda fn, x: vmap(fn)(x),
    "vmap of grad": lambda fn, x: vmap(grad(total(fn)))(x),
    "jvp": lambda fn, x: jvp(fn, (x,), (x,))[1],
    "vjp": lambda fn, x: vjp(fn, x)[1](x)[0],
    "grad of grad": lambda fn, x: grad(total(grad(total(fn))))(x),
    "linearize": lambda fn, x: linearize(fn, x)[1](x),
    "jvp of grad": lambda fn, x: jvp(grad(total(fn)), (x,), (x,))[1],
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize(("way", "kind"), crossed(WAYS, FUNCTIONS, every=4))
def test_steps_see_the_default_device(way: str, kind: str) -> None:
    """Torch puts its modes aside around a Function, and what a step makes would be on another device."""
    x, fn = rand(3, 4), FUNCTIONS[kind]
    expected = WAYS[way](plain, x)
    for _ in range(2):
        SEEN.clear()
        with torch.device("meta"):
            found = WAYS[way](fn, x)
        assert set(SEEN) == {"meta"}
        torch.testing.assert_close(found, expected)


def test_two_modes_and_a_device_are_in_their_order() -> None:
    told: list[str] = []

    class Told(TorchFunctionMode):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.sin:
                told.append(self.name)
            return func(*args, **(kwargs or {}))

    x = rand(3, 4)
    with Told("outer"), torch.device("meta"), Told("inner"):
        grad(total(scanned))(x)
    assert told[:4] == ["inner", "outer"] * 2 and set(zip(told[::2], told[1::2], strict=True)) == {
        ("inner", "outer")
    }


class OfSines(torch.autograd.Function):
    """All that it has calls what a mode changes: its forward, what it saves besides, its two derivatives."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], inputs[0].sin())
        ctx.save_for_forward(inputs[0], inputs[0].sin())

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        x, sine = ctx.saved_tensors
        return cotangents[0] * (sine + x.tanh())

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, sine = ctx.saved_tensors
        return tangents[0] * (sine + x.tanh())


PLAIN: dict[str, Any] = {
    "backward": WAYS["backward"],
    "double backward": lambda fn, x: WAYS["backward"](lambda y: slope(fn, y), x),
    "dual level": lambda fn, x: pushed(fn, x),
    "backward of dual level": lambda fn, x: WAYS["backward"](lambda y: pushed(fn, y), x),
    "dual level of backward": lambda fn, x: pushed(lambda y: slope(fn, y), x),
}


def slope(fn: Any, x: Tensor) -> Tensor:
    x = x if x.requires_grad else x.clone().requires_grad_()
    return torch.autograd.grad(fn(x).square().sum(), x, create_graph=True)[0]


def pushed(fn: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fn(forward_ad.make_dual(x, x.detach().cos()))).tangent


@pytest.mark.parametrize("way", PLAIN)
@pytest.mark.parametrize("kind", ["scan", "loop", "region"])
def test_rules_of_functions_are_under_the_modes_of_the_call(kind: str, way: str) -> None:
    """Plain autograd calls them under these; a scan's step may run at a level of its own."""
    step = OfSines.apply
    of: dict[str, Any] = {
        "scan": lambda x: scan_remat(lambda h, _: (step(h), None), x, length=2, checkpoints=1)[0],
        "loop": lambda x: while_remat(
            lambda c: c[1] < 2, lambda c: (step(c[0]), c[1] + 1), (x, 0), checkpoints=2, max_steps=5
        )[0],
        "region": remat(lambda x: step(step(x))),
    }
    x = rand(3, 4)
    with Changes():
        expected, found = PLAIN[way](lambda x: step(step(x)), x), PLAIN[way](of[kind], x)
    torch.testing.assert_close(found, expected)
