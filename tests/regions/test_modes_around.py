"""Torch-function modes of the user's around a region, and switches that hooks turn during a backward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from remat import remat, save_matmuls, save_nothing
from tests.helpers import rand

POLICIES = [save_nothing, save_matmuls]


class Scaled(TorchFunctionMode):
    """Changes what one function gives; `of`: None for all of them."""

    def __init__(self, of=(torch.exp, torch.Tensor.exp)):
        super().__init__()
        self.of = of

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        changed = isinstance(out, torch.Tensor) and (self.of is None or func in self.of)
        return out * 1.5 if changed else out


class Log(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def layer(x, w):
    return ((x @ w).exp() * x).cos()


def looked_at(x, w):
    """Its ops do not tell all, so that the function runs again as a whole."""
    h = (x @ w).exp()
    h.data_ptr()
    return (h * x).cos()


def grads(fn, mode, around_backward, after=contextlib.nullcontext):
    x, w = rand(3, 3).requires_grad_(), rand(3, 3, seed=1).requires_grad_()
    with mode() as on:
        loss = fn(x, w).sum()
        if around_backward:
            torch.autograd.backward(loss)
    with after():
        if not around_backward:
            loss.backward()
    return [x.grad, w.grad], on


@pytest.mark.parametrize("policy", POLICIES)
def test_a_mode_sees_what_it_sees_without_a_region(policy):
    region = remat(layer, policy=policy)
    _, want = grads(layer, Log, True)
    for _ in range(2):
        _, got = grads(region, Log, True)
        assert got.names == want.names


@pytest.mark.parametrize("fn", [layer, looked_at])
def test_a_mode_around_the_backward_alone_changes_nothing(fn):
    """The engine steps out of modes; one that a hook has entered stays on."""
    want, _ = grads(fn, contextlib.nullcontext, False)
    region = remat(fn)
    for _ in range(2):
        x, w, mode = rand(3, 3).requires_grad_(), rand(3, 3, seed=1).requires_grad_(), Scaled()
        out = region(x, w)
        out.register_hook(lambda g, mode=mode: mode.__enter__() and None)
        try:
            out.sum().backward()
        finally:
            with contextlib.suppress(RuntimeError, AssertionError, IndexError):
                mode.__exit__(None, None, None)
        torch.testing.assert_close([x.grad, w.grad], want, rtol=0, atol=0)


class Tagged(torch.Tensor):
    """A subclass that changes what a function gives."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out: Any = super().__torch_function__(func, types, args, kwargs or {})
        return out * 1.5 if func in (torch.exp, torch.Tensor.exp) else out


@pytest.mark.parametrize("policy", POLICIES)
def test_a_subclass_that_changes_results(policy):
    def run(fn):
        w = rand(3, 3, seed=1).requires_grad_()
        fn(rand(3, 3).as_subclass(Tagged), w).sum().backward()
        return w.grad

    region = remat(layer, policy=policy)
    want = run(layer)
    for _ in range(2):
        torch.testing.assert_close(run(region), want, rtol=0, atol=0)


# -- switches ------------------------------------------------------------------------------------------

SWITCHES = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float16),
    "deterministic": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
        2,
    ),
    "warns alone": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
    "precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "medium",
    ),
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
}


@torch.library.custom_op("remat_modes::reading", mutates_args=())
def reading(x: torch.Tensor, which: str) -> torch.Tensor:
    read, _, other = SWITCHES[which]
    return x.sin() * (3.0 if read() == other else 1.0)


reading.register_fake(lambda x, which: torch.empty_like(x))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("turned_before", [False, True])
@pytest.mark.parametrize("which", SWITCHES)
def test_a_switch_that_a_hook_turns_in_the_middle_of_a_backward(which, turned_before, policy):
    """The region that is recomputed later in the pass runs as in its forward."""
    read, write, other = SWITCHES[which]
    before = read()

    def block(x):
        return (x * reading(x.detach(), which)).exp()

    def run(fn):
        x = rand(4).requires_grad_()
        try:
            if turned_before:
                write(other)
            h = fn(x)
            h.register_hook(lambda g: write(before if turned_before else other))
            fn(h * 1.5).sum().backward()
        finally:
            write(before)
        return x.grad

    region = remat(block, policy=policy)
    want = run(block)
    for _ in range(2):
        torch.testing.assert_close(run(region), want, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["backward", "grad", "forward over reverse"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_default_dtype_that_the_function_turns(way, policy):
    """What takes its dtype from that has the same one when it is made again, and so in a later call that
    turns it otherwise."""
    inside = [torch.float32]

    def block(x):
        before = torch.get_default_dtype()
        torch.set_default_dtype(inside[0])
        try:
            scale = torch.rand(4) * (torch.arange(4) / 3)
        finally:
            torch.set_default_dtype(before)
        return (x * scale).sin().sum()

    def run(fn):
        torch.manual_seed(3)
        x = rand(4).requires_grad_()
        if way == "backward":
            return torch.autograd.grad(fn(x), x)[0]
        x, gradient = x.detach(), torch.func.grad(fn)
        return gradient(x) if way == "grad" else torch.func.jvp(gradient, (x,), (x.cos(),))

    region = remat(block, policy=policy)
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float16):
        inside[0] = dtype
        torch.testing.assert_close(run(region), run(block), rtol=0, atol=0)


def test_autocast_and_grad_mode_that_a_hook_turns():
    def block(x, w):
        return (x @ w).sin() @ w + x

    def run(fn, turn):
        x, w = rand(4, 4).float().requires_grad_(), rand(4, 4, seed=1).float()
        try:
            h = fn(x, w)
            h.register_hook(lambda g: turn())
            fn(h * 1.5, w).sum().backward()
        finally:
            torch.set_autocast_enabled("cpu", False)
            torch.set_grad_enabled(True)
        return x.grad

    region = remat(block)
    want = run(block, lambda: None)
    for turn in (lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.set_grad_enabled(False)):
        for _ in range(2):
            torch.testing.assert_close(run(region, lambda turn=turn: turn() and None), want, rtol=0, atol=0)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_default_device(where):
    """A factory of a function that runs again makes its tensor where it did."""

    def fn(x):
        h = x.sin()
        h.data_ptr()
        return h * torch.ones(3).to(x.device).cos() if where == "backward" else h * torch.ones(3).numel()

    def run(fn):
        x = rand(3).requires_grad_()
        with torch.device("meta") if where == "forward" else contextlib.nullcontext():
            out = fn(x)
        with torch.device("meta") if where == "backward" else contextlib.nullcontext():
            torch.autograd.backward(out, torch.ones_like(x, device="cpu"))
        return x.grad

    region = remat(fn)
    want = run(fn)
    for _ in range(2):
        torch.testing.assert_close(run(region), want, rtol=0, atol=0)


def test_only_warnings_stay_only_warnings():
    """A recomputation does not turn `warn_only` into errors."""

    def fn(x):
        return torch.bincount(torch.arange(3), x.detach()).to(x) * x.sin().exp()

    x = rand(3).requires_grad_()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        out = remat(fn)(x)
        torch.use_deterministic_algorithms(False)
        out.sum().backward()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
