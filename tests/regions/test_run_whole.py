"""Regions whose function runs again as a whole: what is inside them, and what goes with their graph."""

from __future__ import annotations

import gc
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import vmap

from remat import (
    RematError,
    is_recomputing,
    remat,
    save_everything,
    save_matmuls,
    save_nothing,
)
from tests.helpers import LiveBytes, rand, same, unseen


@pytest.mark.parametrize("backward", [True, False])
def test_arguments_go_with_the_graph(backward):
    """No cycle holds them, so nothing waits for Python's garbage collector."""
    x = rand(16, 16).requires_grad_()
    region = remat(lambda a: (a + unseen(a, 0.5)).exp())
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            for _ in range(3):
                out = region(x * 2).sum()
                if backward:
                    out.backward()
                    x.grad = None
                del out
            assert live.bytes == 0
    finally:
        gc.enable()


def grads(make: Callable[[Any], Any], fn: Callable[..., Any] | None = None) -> list[torch.Tensor]:
    """Gradients of two calls of `make(region)`; `fn`: what makes regions."""
    found = []
    for _ in range(2):
        x = rand(3, 4).requires_grad_()
        out = make(fn or (lambda f: f))(x)
        found += torch.autograd.grad(out.sum(), x)
    return found


def by_identity(region, x):
    return region(lambda a: (a + unseen(a, 0.5)) * (2.0 if a is x else 3.0))(x)


def by_identity_in_a_helper(region, x):
    h = x.sin()
    helper = lambda a: a * 2.0 if a is h else a * 3.0  # noqa: E731
    return region(lambda a, b: helper(a) * unseen(b, 0.5))(h, x)


def saved_inside(region, x):
    """A region inside saves a captured tensor and an argument: one tensor, in both passes."""

    def outer(a):
        torch.func.jvp(lambda b: region(lambda c: x * a + 0 * c)(b), (a,), (x.detach(),))
        return a * unseen(a, 0.5) * 0.3

    return region(outer)(x)


def under_torch_func(region, x):
    def loss(z):
        return region(lambda a: a.sin() * (2.0 if a is z else 3.0))(z).sum()

    return torch.func.grad(loss)(x.detach()) * x


def under_two_levels(region, x):
    def loss(z):
        return region(lambda a: a.sin() * (2.0 if a is z else 3.0))(z).sum()

    return torch.func.grad(lambda z: torch.func.grad(loss)(z).square().sum())(x.detach()) * x


def batched(region, x):
    return torch.func.vmap(lambda z: region(lambda a: a.sin() * (2.0 if a is z else 3.0))(z))(x)


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=repr)
@pytest.mark.parametrize(
    "case",
    [by_identity, by_identity_in_a_helper, saved_inside, under_torch_func, under_two_levels, batched],
)
def test_what_is_captured_and_given_is_one_tensor(case, policy):
    def make(region):
        return lambda x: case(region, x)

    torch.testing.assert_close(grads(make, lambda fn: remat(fn, policy=policy)), grads(make))


def test_what_is_captured_and_given_may_be_assigned_to():
    def loss(region, x):
        seen = x

        def inner(a):
            nonlocal seen
            seen = seen * 2
            return a * 3

        return (region(inner)(x) * seen).sum()

    x = rand(3, 4)
    first = torch.func.grad(lambda x: loss(remat, x))
    assert loss(remat, x).equal((6 * x * x).sum()) and first(x).equal(12 * x)
    second = torch.func.grad(lambda x: first(x).square().sum())
    torch.testing.assert_close(second(x), 288 * x)


def test_an_engine_that_has_gone_on_is_told_of():
    engine = torch.quasirandom.SobolEngine(400)
    region = remat(lambda a: (a + engine.draw(500, dtype=a.dtype)).sin())
    out = region(rand(500, 400).requires_grad_()).sum()
    with pytest.raises(RematError, match="does not repeat its forward"):
        out.backward()


def test_python_does_not_run_again_where_ops_fill_empty_memory():
    calls = []

    def fn(a):
        calls.append(a)
        parts, mask = torch.empty_like(a), a > 0
        parts.t_().t_()
        parts[mask] = a[mask] * 2
        parts[~mask] = 1.0
        scaled = torch.mul(parts.detach(), 2, out=torch.empty_like(parts.detach()))
        rows = a.new_empty(2, 4).normal_()
        return (parts.sin() * scaled.add_(1) * rows[:1].mul_(2)).exp()

    def make(region):
        torch.manual_seed(0)
        return region(lambda a: fn(a))

    want = grads(make)
    del calls[:]
    same(grads(make, remat), want)
    assert len(calls) == 2


def test_a_region_inside_that_captures_an_argument_under_vmap_and_autocast():
    def found(region):
        x, y = rand(2, 3, 4).requires_grad_(), rand(3, 4, seed=1).requires_grad_()

        def outer(a):
            return region(lambda: (a / (1 + a**2)) @ y.mT)()

        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = vmap(region(outer))(x)
        return torch.autograd.grad(out.square().sum(), (x, y))

    same(found(remat), found(lambda fn: fn))


def test_a_region_inside_that_finds_a_weight_cast_already():
    """Autocast caches casts of weights, for the second run, too, if it is on around the backward."""

    def found(region):
        torch.manual_seed(0)
        x, lin = rand(3, 4).float().requires_grad_(), nn.Linear(4, 4)

        def outer(a):
            replaced = a * 2
            replaced.data = replaced.data.sin()
            return region(lambda b: lin(b.sin()).sin())(a) * (replaced * a).cos()

        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autograd.grad(region(outer)(x).sum(), (x, lin.weight))

    same(found(remat), found(lambda fn: fn))


class Stores(nn.Module):
    """A layer that leaves something at every place where Python can, of a function that runs again."""

    __slots__ = ("slot",)
    of_class: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.items, self.table, self.seen = [], {"first": 0}, set()
        self.last, self.recent, self.local = None, deque([], maxlen=3), threading.local()

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        global left_global  # noqa: PLW0603
        left_global = a.detach()
        self.last = self.slot = self.local.one = a.detach() * 2
        self.register_buffer("mask", a.detach() > 0, persistent=False)
        self.child = nn.Identity()
        Stores.of_class = self.flag = True
        self.items.append(a.detach())
        self.recent.append(len(self.items))
        self.table["n"] = self.table.get("n", 0) + 1
        self.table.pop("first", None)
        self.seen.add(a.shape)
        return (a + unseen(a, 0.5)).exp()


def emptied(layer: Any) -> None:
    del globals()["left_global"], Stores.of_class
    del layer.last, layer.flag, layer.mask, layer.child, layer.slot, layer.local.one
    for container in (layer.items, layer.recent, layer.table, layer.seen):
        container.clear()


def replaced(layer: Any) -> None:
    layer.last = layer.slot = layer.local.one = layer.mask = None
    layer.items[:] = [5]
    layer.table["n"] = layer.flag = 7


@pytest.mark.parametrize("taught", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("change", [emptied, replaced, lambda _: None], ids=["emptied", "replaced", "left"])
def test_a_second_run_of_the_function_leaves_nothing(change: Any, taught: bool) -> None:
    """What the caller has taken away between forward and backward stays away, and a list grows once."""

    def found(region: Any) -> Any:
        layer, x = Stores(), rand(3, 4).requires_grad_()
        fn = region(layer.forward)
        for _ in range(1 + taught):
            out = fn(x).sum()
            change(layer)
            out.backward()
        own = {key: value for key, value in vars(layer).items() if not key.startswith("_")}
        slot, one = getattr(layer, "slot", "gone"), vars(layer.local)
        own |= {"slot": slot, "one": one, "buffers": layer._buffers, "children": [*layer._modules]}
        return own | {"global": globals().get("left_global"), "class": vars(Stores).get("of_class", "gone")}

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shown(one) for key, one in value.items() if key != "local"}
        if isinstance(value, (list, deque)):
            return [*map(shown, value)]
        return value.tolist() if isinstance(value, torch.Tensor) else value

    assert shown(found(remat)) == shown(found(lambda fn: fn))


def test_what_other_threads_take_meanwhile_stays_taken() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.work: queue.Queue[int] = queue.Queue()

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            if is_recomputing():
                taker = threading.Thread(target=self.work.get)
                taker.start()
                taker.join()
            else:
                self.work.put(1)
            return (a + unseen(a, 0.5)).exp()

    layer = Layer()
    remat(layer.forward)(rand(3, 4).requires_grad_()).sum().backward()
    assert layer.work.empty()


def test_what_a_region_inside_holds_is_no_value_of_the_one_around() -> None:
    """The outer one has kept in the forward what the inner one makes from `x` when both run again."""
    x, y = rand(3, 4).requires_grad_(), rand(3, 4)

    def gradient(around: Callable[..., Any]) -> torch.Tensor:
        h = x * 1

        def function(a: torch.Tensor) -> torch.Tensor:
            inner = around(lambda: torch.zeros_like(h).copy_(h).sin(), policy=save_nothing)()
            factor = a * 2
            factor.data = factor.data.sin()
            return factor * inner

        return torch.autograd.grad(
            around(function, policy=save_everything | save_nothing)(y).square().sum(), x
        )[0]

    same(gradient(remat), gradient(lambda fn, **_: fn))
