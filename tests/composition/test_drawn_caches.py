"""Caches that a first call fills with what it has drawn: a second run of the function finds them filled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from remat import remat, save_matmuls, save_nothing

FUNC = torch.func
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Cached(nn.Module):
    samples: Tensor | None = None

    def make(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if self.samples is None:
            self.samples = self.make(x)
        return (x.sin() * self.samples).tanh()


class Sobol(Cached):
    """The samplers of botorch: the engine's kernels fill what `empty` has made."""

    def make(self, x: Tensor) -> Tensor:
        drawn = SobolEngine(4, scramble=True, seed=3).draw(1, dtype=torch.float64)
        return torch.erfinv(2 * (drawn - 0.5) * 0.99)[0]


class Locked(Cached):
    """One mask of dropout for all calls."""

    def make(self, x: Tensor) -> Tensor:
        return torch.empty(4, dtype=torch.float64).bernoulli_(0.5) / 0.5


class Own(Cached):
    def make(self, x: Tensor) -> Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Later(Cached):
    """More is drawn after that."""

    def make(self, x: Tensor) -> Tensor:
        return torch.rand(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5) + torch.rand(4, dtype=torch.float64) * x


def loss(module: Any, x: Tensor, whole: bool, r: Any) -> Tensor:
    def block(x: Tensor) -> Tensor:
        y = module(x)
        if whole:  # NumPy has it: the function runs again as a whole
            return y * torch.from_numpy(y.detach().numpy() * 0 + 1)
        return y

    wrapped = r(block)
    return (wrapped(x) * wrapped(x * 0.5)).sum()


def backward(module: Any, whole: bool, r: Any) -> Any:
    found = []
    for _ in range(3):
        x = X.clone().requires_grad_()
        loss(module, x, whole, r).backward()
        found.append(x.grad)
    return found, torch.get_rng_state()


def grad(module: Any, r: Any) -> Any:
    return [FUNC.grad(lambda x: loss(module, x, False, r))(X) for _ in range(2)], torch.get_rng_state()


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=["nothing", "matmuls"])
@pytest.mark.parametrize("way", ["backward", "whole", "grad"])
@pytest.mark.parametrize("kind", [Sobol, Locked, Own, Later])
def test_is_as_without_remat(kind: Any, way: str, policy: Any) -> None:
    if kind is Sobol and way == "grad":
        pytest.skip("plain torch refuses it")

    def run(r: Any) -> Any:
        torch.manual_seed(5)
        return grad(kind(), r) if way == "grad" else backward(kind(), way == "whole", r)

    torch.testing.assert_close(
        run(lambda f: remat(f, policy=policy)), run(lambda f: f), rtol=1e-13, atol=1e-15
    )
