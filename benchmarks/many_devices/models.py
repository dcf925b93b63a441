"""The model of `benchmarks.many_devices`: a few blocks, and experts in the place of their MLPs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import scaled_dot_product_attention, silu

from remat import checkpoint_name


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.each = heads, width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            part(x).view(rows, length, self.heads, self.each).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o(checkpoint_name(mixed.reshape(rows, length, -1), "attention"))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """One expert a process: half of the tokens go to the other one, and come back."""

    def __init__(self, mlp: nn.Module, group: Any) -> None:
        super().__init__()
        self.mlp, self.group = mlp, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd as exchange

        flat = x.reshape(-1, x.shape[-1])
        mine = exchange(flat, None, None, self.group)
        back = exchange(self.mlp(mine).contiguous(), None, None, self.group)
        return back.reshape(x.shape)


class Block(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, inner: int = 128) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.RMSNorm(width), MLP(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    """Blocks, and a layer before and after them.

    Attributes:
        sharded: a mesh over which the sequence is sharded between the blocks, or None.
    """

    def __init__(self, depth: int = 2, width: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.layers: Any = nn.ModuleList([Block(width) for _ in range(depth)])
        self.sharded: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.sharded is not None:
            whole = DTensor.from_local(x, self.sharded, [Replicate()])
            x = whole.redistribute(placements=[Shard(1)]).to_local()
        for layer in self.layers:
            x = layer(x)
        if self.sharded is not None:
            x = DTensor.from_local(x, self.sharded, [Shard(1)]).full_tensor()
        return self.last(x)
