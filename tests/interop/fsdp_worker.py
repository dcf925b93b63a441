"""One process of test_fsdp: a sharded stack trained with and without remat."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from remat import remat
from tests.helpers import POLICIES
from tests.interop.ranks import group_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    # The first step makes what the sharding needs; the second finds it, and what remat learnt from the first.
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]  # type: ignore


def sharded(model: nn.Sequential, mesh: DeviceMesh, policy: str | None) -> nn.Module:
    for i, block in enumerate(model):
        fully_shard(block, mesh=mesh)
        if policy is not None:
            # The region is around the sharded module, so that its hooks run inside, in both passes.
            model[i] = Around(block, policy)
    fully_shard(model, mesh=mesh)
    return model


class Around(nn.Module):
    def __init__(self, inner: nn.Module, policy: str) -> None:
        super().__init__()
        self.inner = inner
        self.region = remat(inner.__call__, policy=POLICIES[policy])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.region(x)


def work(rank: int, path: str) -> None:
    with group_of(rank, path):
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        plain = nn.Sequential(Block(), Block())
        x = torch.randn(4, 8) + rank
        expected = gradients(sharded(copy.deepcopy(plain), mesh, None), x)
        for policy in ("nothing", "matmuls"):
            got = gradients(sharded(copy.deepcopy(plain), mesh, policy), x)
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
