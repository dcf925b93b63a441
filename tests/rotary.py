"""Blocks with rotary tables, which depend on nothing that a region is given, and a policy not to share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from remat import Policy
from tests.helpers import rand


def angles(x: Tensor, base: float = 100.0) -> Tensor:
    rate = base ** (-torch.arange(2, dtype=x.dtype) / 2)
    return torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * rate


def rotate(x: Tensor, base: float = 100.0) -> Tensor:
    # Twice, as code does that computes its angles where it needs them: what is alike is made once.
    cos, sin = angles(x, base).cos(), angles(x, base).sin()
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


def block(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(rotate(x @ w))


def chain(region: Callable[..., Tensor], depth: int = 3) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(depth):
            x = region(w, x)
        return x.square().sum()

    return loss


def inputs() -> tuple[Tensor, Tensor]:
    return rand(4, 4).requires_grad_(), rand(8, 6, 4).requires_grad_()


@dataclass(frozen=True)
class Alone(Policy):
    shares_constants = False  # type: ignore[assignment]

    def __call__(self, info: object) -> bool:
        return False
