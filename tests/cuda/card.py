"""What tests on a card share: a block of a transformer, and what a step leaves in the card's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import checkpoint_name, remat
from tests.inside import trace_memory

ON_A_CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
WIDTH, HEADS, LENGTH = 256, 4, 128


class Block(nn.Module):
    """Attention by the fused kernel and a gated layer, with dropout in both where it is asked for."""

    def __init__(self, drop: float = 0.0, attends: bool = True) -> None:
        super().__init__()
        self.attends = attends
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        drop = self.drop if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, None, drop, is_causal=True) if self.attends else q * k
        x = x + F.dropout(self.proj(mixed.transpose(1, 2).flatten(2)), self.drop, self.training)
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(checkpoint_name(F.silu(gate) * up, "hidden"))


class Model(nn.Module):
    """Blocks, each of them a region where there is a policy."""

    def __init__(self, depth: int = 3, drop: float = 0.0, attends: bool = True, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(drop, attends) for _ in range(depth))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = remat(block, **self.options)(x) if self.options else block(x)
        return x.float().square().mean()


def models(
    depth: int = 3, dtype: Any = torch.bfloat16, attends: bool = True, **options: Any
) -> tuple[Any, Any]:
    """One without regions and one with, with the same weights."""
    torch.manual_seed(0)
    drop = options.pop("drop", 0.0)
    plain = Model(depth, drop, attends).to("cuda", dtype)
    ours = Model(depth, drop, attends, **options).to("cuda", dtype)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def batch(seed: int = 1, rows: int = 4, length: int = LENGTH, dtype: Any = torch.bfloat16) -> Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, length, WIDTH, generator=made, device="cuda", dtype=dtype)


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, seed: int = 7) -> list[Tensor]:
    """The loss and the gradients of one step, and the state that the card's generator is left in."""
    torch.cuda.manual_seed(seed)
    loss = call(x)
    found = torch.autograd.grad(loss, list(model.parameters()))
    return [loss.detach(), *found, torch.cuda.get_rng_state()]


def same(got: list[Tensor], expected: list[Tensor], tolerance: float = 0.0) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def near(got: list[Tensor], expected: list[Tensor]) -> None:
    """Up to roundings of bfloat16: compiled kernels round elsewhere, transforms add in another order."""
    for one, other in zip(got, expected, strict=True):
        apart = (one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-12)
        assert apart < 2e-2, float(apart)


def bytes_of(step: Callable[[Callable[[], None]], Any]) -> tuple[int, int]:
    """What is kept between forward and backward, and the peak, above what was there before."""
    for _ in range(2):
        step(lambda: None)  # what the first steps set up, such as workspaces of cuBLAS
    found = trace_memory(step, "cuda")
    return found.kept, found.peak


def step_of(model: nn.Module, x: Tensor) -> Callable[[Callable[[], None]], Any]:
    def step(mark: Callable[[], None]) -> None:
        loss = model(x)
        mark()
        torch.autograd.grad(loss, list(model.parameters()))

    return step
