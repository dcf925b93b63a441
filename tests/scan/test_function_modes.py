"""Steps see the torch-function modes of the call, under transforms and in recomputations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, linearize, vjp, vmap
from torch.overrides import TorchFunctionMode

from remat import remat, scan_remat, while_remat
from tests.helpers import crossed, rand

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
