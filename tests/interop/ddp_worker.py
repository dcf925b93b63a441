"""One process of test_ddp: parameters in several regions, and batch norm, trained with and without remat."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from remat import remat
from tests.helpers import POLICIES
from tests.interop.ranks import group_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Twice(nn.Module):
    """The same region twice: each of its parameters gets gradients from two recomputations."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head, self.unused = Block(), nn.Linear(4, 1), nn.Linear(2, 2)
        self.policy: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        region: Any = self.block
        if self.policy is not None:
            region = remat(self.block, policy=POLICIES[self.policy])
        return self.head(region(torch.sin(region(x))))


def train(plain: Twice, policy: str | None, x: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(plain)
    model.policy = policy
    if not options["find_unused_parameters"]:
        del model.unused
    ddp = nn.parallel.DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = {}
    # The first step traces, and builds the buckets anew; later ones run from what it taught.
    for step in range(3):
        optimizer.zero_grad()
        ddp(x + step).square().mean().backward()
        found |= {f"{step} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return found


def work(rank: int, path: str) -> None:
    with group_of(rank, path):
        torch.manual_seed(0)
        plain = Twice()
        x = torch.randn(5, 4) + rank
        for static_graph in (False, True):
            for unused in (False, True):
                options = dict(static_graph=static_graph, find_unused_parameters=unused)
                expected = train(plain, None, x, **options)
                both: list[Any] = [None, None]
                dist.all_gather_object(both, [v for k, v in expected.items() if k.startswith("2 ")])
                torch.testing.assert_close(both[0], both[1])
                # Two batches a step went through the layer, three steps, each counted once.
                assert expected["block.norm.num_batches_tracked"] == 6
                for policy in ("nothing", "matmuls", "offload"):
                    got = train(plain, policy, x, **options)
                    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
