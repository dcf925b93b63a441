"""State of the user's: captured when a forward begins, put back around its recomputation, updated once."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch
from torch.func import grad, vjp, vmap
from torch.overrides import TorchFunctionMode

from remat import RematError, register_state, remat, save_matmuls
from tests.helpers import rand, unseen
from tests.regions.inside import numpy_random, python_random


def by_func(fn, x):
    return grad(lambda x: fn(x).sum())(x)


def by_autograd(fn, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(fn(x).sum(), x)[0]


def by_vmap(fn, x):
    return vmap(grad(lambda x: fn(x).sum()))(x)


def twice(fn, x):
    out, pull = vjp(lambda x: by_func(fn, x), x)  # pyright: ignore[reportAssignmentType]
    return pull(torch.ones_like(out))[0]


RUNS = {"func": by_func, "autograd": by_autograd, "vmap": by_vmap, "second order": twice}


class Recipe:
    """As a library for FP8 has it: a scale that is in force, and a history that every forward adds to."""

    def __init__(self):
        self.scale, self.history = 2.0, []

    def capture(self):
        return self.scale, list(self.history)

    @contextlib.contextmanager
    def replay(self, captured):
        now = self.capture()
        self.scale, self.history = captured[0], list(captured[1])
        try:
            yield
        finally:
            self.scale, self.history = now

    def layer(self, x):
        self.history.append(1.0)
        return (x * self.scale * len(self.history)).sin().exp()


@pytest.mark.parametrize("policy", [None, save_matmuls])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_recipe_is_found_again_and_updated_once(run, policy):
    x, plain, recipe = rand(3, 4), Recipe(), Recipe()
    with register_state(recipe.capture, recipe.replay):
        region = remat(recipe.layer, policy=policy)
        for _ in range(3):
            want, got = run(plain.layer, x), run(region, x)
            assert torch.allclose(got, want)
            assert recipe.history == plain.history


@pytest.mark.parametrize("run", [by_func, by_autograd])
def test_a_change_between_forward_and_backward(run):
    """Where ops do not tell all that was computed the function runs again, in plain autograd too."""
    recipe, x = Recipe(), rand(3)

    def layer(x):
        return (recipe.layer(x) * (unseen(x, 1.0) if run is by_autograd else 1.0)).sin()

    class Later(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(y):
            return y.clone()

        @staticmethod
        def setup_context(ctx, inputs, output): ...

        @staticmethod
        def backward(ctx, g):
            recipe.scale = 5.0
            return g

    want = run(layer, x)
    recipe.history.clear()
    with register_state(recipe.capture, recipe.replay):
        got = run(lambda x: Later.apply(remat(layer)(x)), x)
    assert torch.allclose(got, want) and recipe.scale == 5.0 and len(recipe.history) == 1


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.Tensor.sin else out


def test_a_torch_function_mode_is_entered_again():
    """The mode is around the forward only."""
    x, entered = rand(3), []

    def around(mode):
        return mode if mode is not None else contextlib.nullcontext()

    def run(fn):
        with Doubled() as mode:
            entered[:] = [mode]
            _, pull = vjp(lambda x: fn(x).sum(), x)  # pyright: ignore[reportAssignmentType]
            entered[:] = []
        return pull(torch.ones((), dtype=x.dtype))[0]

    want = run(lambda x: x.sin().exp())
    assert not torch.allclose(want, by_func(lambda x: x.sin().exp(), x))
    with register_state(lambda: Doubled() if entered else None, around):
        assert torch.allclose(run(remat(lambda x: x.sin().exp())), want)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("which", ["python", "numpy"])
def test_random_state_of_python_and_numpy(which, run):
    pair, draw, seed = {
        "python": (python_random, random.random, random.seed),
        "numpy": (numpy_random, np.random.random, np.random.seed),
    }[which]

    def layer(x):
        return (x * (1.0 + draw())).sin().exp()

    x, after = rand(3, 4), []
    with register_state(*pair):
        found = []
        for fn in (layer, remat(layer)):
            seed(0)
            found.append(run(fn, x))
            after.append(draw())
    assert torch.allclose(found[0], found[1]) and after[0] == after[1]


def test_what_was_removed_is_not_captured():
    calls = []
    registration = register_state(lambda: calls.append(1), lambda _: contextlib.nullcontext())
    by_func(remat(torch.sin), rand(3))
    registration.remove()
    registration.remove()
    by_func(remat(torch.sin), rand(3))
    assert len(calls) == 1


def test_a_pair_that_is_none():
    with pytest.raises(RematError, match="capture"):
        register_state(3, contextlib.nullcontext)  # pyright: ignore
    with pytest.raises(RematError, match="replay"):
        register_state(list, None)  # pyright: ignore
