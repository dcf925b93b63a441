"""Memory that samplers, NumPy and raw kernels fill past torch, beside caches that a first call fills."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from remat import RematError, remat, saved_residuals
from tests.helpers import rand, same, unseen

D = torch.float64


def by_numpy(rng: Any, x: Tensor) -> Tensor:
    made = torch.empty(3, 4, dtype=D)
    made.numpy()[...] = rng.normal(size=(3, 4))
    return made


class Layer(nn.Module):
    """Fills large memory past torch, and caches what it computes of its weight, as gpytorch does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rand(4, 4, seed=1))
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "root" not in self.cache:
            self.cache["root"] = (self.weight @ self.weight.t()).exp().tanh()
        return ((x.sin() @ self.cache["root"] * unseen(x, 0.5)).exp() @ self.weight).tanh()


def test_memory_that_is_filled_once_more_after_it_was_read() -> None:
    """Its readers get what they have read."""
    calls = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        scratch = torch.empty(3, 4, dtype=D)
        there = scratch.numpy()
        there[...] = 0.5
        out = (x * scratch).exp()
        there[...] = 7.0
        return out

    x = rand(3, 4).requires_grad_()
    with torch.no_grad():
        want = (x * 0.5).exp() * 0.5
    for _ in range(2):
        same(torch.autograd.grad(remat(fn)(x).sum(), x)[0], want)
    assert len(calls) == 2


def test_a_look_that_writes_nothing_runs_nothing_again() -> None:
    calls = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        h = x.sin()
        scale = float(np.abs(h.detach().numpy()).max())
        return (h / scale).exp() * torch.from_numpy(h.detach().numpy() + 1)

    def grads(run: Any) -> Any:
        found = []
        for seed in (0, 0, 1):
            x = rand(3, 4, seed=seed).requires_grad_()
            found.append(torch.autograd.grad(run(x).sum(), x)[0])
        return found

    want = grads(fn)
    del calls[:]
    same(grads(remat(fn)), want)
    assert len(calls) == 3


def test_what_is_held_is_reported_and_no_more_than_autograd_holds() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x.sin().exp() * by_numpy(np.random.default_rng(0), x)).tanh().sin()

    x = rand(3, 4).requires_grad_()
    held = saved_residuals(remat(fn), x)
    assert sorted(r.shape for r in held) == [(3, 4), (3, 4)], held
    assert sum(r.bytes for r in held) <= sum(r.bytes for r in saved_residuals(fn, x))


def test_large_memory_is_filled_again_by_the_function() -> None:
    """Held, it would be as much as it takes to run the function again."""
    calls = itertools.count()

    def fn(x: Tensor) -> Tensor:
        next(calls)
        return (x * unseen(x, 0.5)).exp()

    x = rand(3, 4).requires_grad_()
    (got,) = torch.autograd.grad(remat(fn)(x).sum(), x)
    same(got, (x.detach() * 0.5).exp() * 0.5)
    assert next(calls) == 2


def test_a_cache_beside_large_memory_is_told() -> None:
    """The second run reads the cache, and computes less (docs/limits.md)."""
    layer = Layer()
    x = rand(3, 4).requires_grad_()
    with pytest.raises(RematError, match="does not repeat its forward"):
        remat(layer)(x).sum().backward()


def test_numpy_of_a_number_that_nothing_else_reads_under_torch_func() -> None:
    """A region runs it, where torch alone refuses."""

    def fn(x: Tensor) -> Tensor:
        return (x.exp() * float(x.cos().detach().numpy().sum())).sin().sum()

    x = rand(3, 4).requires_grad_()
    for _ in range(2):
        same(torch.func.grad(remat(fn))(x.detach()), torch.autograd.grad(fn(x), x)[0])
