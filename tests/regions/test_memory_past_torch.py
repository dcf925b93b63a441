"""Memory that samplers, NumPy and raw kernels fill past torch, beside caches that a first call fills."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from remat import (
    RematError,
    checkpoint_policy,
    remat,
    save_everything,
    save_matmuls,
    save_nothing,
    saved_residuals,
)
from tests.helpers import crossed, rand, same, unseen

D = torch.float64
POLICIES = [save_nothing, save_matmuls, save_everything]


def sobol(rng: Any, x: Tensor) -> Tensor:
    return torch.quasirandom.SobolEngine(4, scramble=True, seed=3).draw(3, dtype=D)


def by_numpy(rng: Any, x: Tensor) -> Tensor:
    made = torch.empty(3, 4, dtype=D)
    made.numpy()[...] = rng.normal(size=(3, 4))
    return made


def part_by_part(rng: Any, x: Tensor) -> Tensor:
    made = torch.zeros(3, 4, dtype=D)
    there = made.numpy()
    there[:2] = rng.normal(size=(2, 4))
    first = made.exp()
    there[2:] = rng.normal(size=(1, 4))
    made[0].mul_(2)
    second = made * first
    there[0] = 0.5
    return second + made


def by_ctypes(rng: Any, x: Tensor) -> Tensor:
    numbers, made = rng.normal(size=12), torch.empty(3, 4, dtype=D)
    ctypes.memmove(made.data_ptr(), numbers.ctypes.data, numbers.nbytes)
    return made.mul_(0.5).t().contiguous().t()


def by_dlpack(rng: Any, x: Tensor) -> Tensor:
    made = torch.empty(6, 4, dtype=D)
    np.from_dlpack(made)[...] = rng.normal(size=(6, 4))
    return made[::2]


def one_scratch(rng: Any, x: Tensor) -> Tensor:
    """One memory, filled again and again."""
    scratch, total = torch.empty(3, 4, dtype=D), torch.zeros(3, 4, dtype=D)
    there = scratch.numpy()
    for _ in range(3):
        there[...] = rng.normal(size=(3, 4))
        total = total + scratch.sin()
    return total


def over_a_value(rng: Any, x: Tensor) -> Tensor:
    made = x.detach().exp()
    made.numpy()[...] *= rng.normal(size=(3, 4))
    return made


def beside_ops(rng: Any, x: Tensor) -> Tensor:
    """Ops fill the rest before anyone reads."""
    made = torch.ones(3, 4, dtype=D)
    there = made.numpy()
    there[0] = rng.normal(size=4)
    made[1].zero_()
    there[2] = rng.normal(size=4)
    torch.exp(x.detach()[1], out=made[1])
    return made


FILLS = [sobol, by_numpy, part_by_part, by_ctypes, by_dlpack, one_scratch, over_a_value, beside_ops]


class Layer(nn.Module):
    """Draws past torch, and caches what it computes of its weight, as gpytorch does."""

    def __init__(self, fill: Callable[[Any, Tensor], Tensor], graph: bool) -> None:
        super().__init__()
        self.fill, self.graph, self.calls = fill, graph, 0
        self.rng = np.random.default_rng(0)
        self.weight = nn.Parameter(rand(4, 4, seed=1))
        self.cache: dict[str, Any] = {}

    def root(self) -> Tensor:
        if "root" not in self.cache:
            made = (self.weight @ self.weight.t()).exp().tanh()
            self.cache["root"] = made if self.graph else made.detach()
        return self.cache["root"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = x.sin() @ self.root()
        return ((h * self.fill(self.rng, x)).exp() @ self.weight).tanh()


def plainly(layer: Layer, run: Callable[[Tensor], Tensor]) -> Any:
    found = []
    for _ in range(3):
        x = rand(3, 4).requires_grad_()
        given = [x, layer.weight]
        out = run(x).square().sum()
        first = torch.autograd.grad(out, given, create_graph=True)
        found += [*first, *torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), given)]
        if layer.graph:  # whose graph is gone
            layer.cache.clear()
    return found, layer.calls


def checkpointed(layer: Layer, run: Callable[[Tensor], Tensor]) -> Any:
    """Torch's checkpoint runs all of it again, and finds the cache: it has to be there before."""
    layer.cache["root"] = rand(4, 4, seed=2)
    x = rand(3, 4).requires_grad_()
    return torch.autograd.grad(run(x).square().sum(), [x, layer.weight]), layer.calls


@pytest.mark.parametrize(("fill", "policy", "graph"), crossed(FILLS, POLICIES, [False, True]))
def test_a_sampler_beside_a_cache(fill: Any, policy: Any, graph: bool) -> None:
    """First and later calls; and the function has run once a call."""
    plain, layer = Layer(fill, graph), Layer(fill, graph)
    want, got = plainly(plain, plain), plainly(layer, remat(layer, policy=policy))
    same(got[0], want[0])
    assert got[1] == want[1]


@pytest.mark.filterwarnings("ignore:.*cannot be planned")
def test_under_a_budget() -> None:
    """A look draws nothing: this sampler does not run on tensors without data."""
    plain, layer = Layer(sobol, False), Layer(sobol, False)
    region = remat(layer, policy=checkpoint_policy(budget=0.5, cost="flops"))
    same(plainly(layer, region)[0], plainly(plain, plain)[0])


@pytest.mark.parametrize(("fill", "policy"), crossed(FILLS, POLICIES))
def test_in_a_region_around_and_beside_a_region_inside(fill: Any, policy: Any) -> None:
    def nested(layer: Layer, region: Any) -> Any:
        inner = region(layer)
        return plainly(layer, region(lambda x: inner(x.cos()).sin() * fill(layer.rng, x)))

    plain, layer = Layer(fill, False), Layer(fill, False)
    got, want = nested(layer, lambda f: remat(f, policy=policy)), nested(plain, lambda f: f)
    same(got[0], want[0])
    assert got[1] == want[1]


@pytest.mark.parametrize("fill", FILLS)
def test_a_backward_inside_the_region(fill: Any) -> None:
    """It reads values in such memory."""

    def fn(rng: Any, x: Tensor) -> Tensor:
        energy = (x.sin() * fill(rng, x)).exp().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy * force.tanh()

    def run(wrap: Any) -> Any:
        rng, found = np.random.default_rng(0), []
        region = wrap(lambda x: fn(rng, x))
        for _ in range(2):
            x = rand(3, 4).requires_grad_()
            found.append(torch.autograd.grad(region(x).sum(), x)[0])
        return found

    same(run(remat), run(lambda f: f))


class Raw(torch.autograd.Function):
    """A kernel past torch whose result autograd alone reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.numpy()[...] = np.tanh(x.detach().numpy())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("later", [False, True])
def test_what_autograd_alone_reads(policy: Any, later: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        out = Raw.apply(x.sin())
        return out.exp() if later else out

    x = rand(3, 4).requires_grad_()
    want = torch.autograd.grad(fn(x).sum(), x)
    region = remat(fn, policy=policy)
    for _ in range(2):
        same(torch.autograd.grad(region(x).sum(), x), want)


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
    calls = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return (x * unseen(x, 0.5)).exp()

    x = rand(3, 4).requires_grad_()
    (got,) = torch.autograd.grad(remat(fn)(x).sum(), x)
    same(got, (x.detach() * 0.5).exp() * 0.5)
    assert len(calls) == 2


@pytest.mark.parametrize("fill", FILLS)
def test_under_the_checkpoint_of_torch(fill: Any) -> None:
    def run(wrap: Any) -> Any:
        layer = Layer(fill, False)
        inner = wrap(layer)
        return checkpointed(layer, lambda x: checkpoint(lambda x: inner(x).sin(), x, use_reentrant=False))

    same(run(remat)[0], run(lambda f: f)[0])


def test_a_cache_beside_large_memory_is_told() -> None:
    """The second run reads the cache, and computes less (docs/limits.md)."""
    layer = Layer(lambda rng, x: unseen(x, 0.5), True)
    x = rand(3, 4).requires_grad_()
    with pytest.raises(RematError, match="does not repeat its forward"):
        remat(layer)(x).sum().backward()
