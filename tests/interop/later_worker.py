"""One process of test_later: what ranks do with collectives in later calls and second runs; and HSDP."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import remat
from remat import RematError, checkpoint_policy, save_matmuls, save_nothing
from remat._ranks import agreement
from remat._ranks.meeting import Meeting
from tests.interop.ranks import group_of


class Changing(nn.Module):
    """A block of which a flag decides how often it sends, another one whether it runs a further op."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.twice = self.more = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.down(torch.tanh(self.up(x)))
        out = self.down(torch.tanh(self.up(out))) if self.twice else out
        return (out.sin() if self.more else out) + x


def parallel(policy: Any) -> Changing:
    torch.manual_seed(0)
    block = Changing()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    remat.nn.apply_to(block, policy=policy)
    return block


def forward(block: nn.Module, rows: int = 4) -> torch.Tensor:
    return block(torch.ones(rows, 32, requires_grad=True))


def step(block: nn.Module, rows: int = 4) -> None:
    forward(block, rows).sum().backward()


def other_ops() -> None:
    """A rank alone runs a further op, whose gradient reads what a collective has made: it would run
    that again and wait for the others. Later it says so by itself; in a first call both do."""
    rank = dist.get_rank()
    block = parallel(save_nothing)
    block.more = rank == 0
    with pytest.raises(RematError, match=rf"rank {rank} has .*, rank {1 - rank} has "):
        step(block)
    agreement._SECONDS, begun = 2, time.monotonic()
    block.more = False
    step(block)
    block.more = rank == 0
    try:
        if rank == 0:
            with pytest.raises(RematError, match=r"on rank 0 what it did in no call before: .*all_reduce"):
                forward(block)
        else:
            forward(block)
    finally:
        agreement._SECONDS = 120
    assert time.monotonic() - begun < 60


class Asked:
    """Counts how often ranks have met."""

    def __init__(self) -> None:
        self.count, plain = 0, Meeting.all_say

        def all_say(meeting: Any, *args: Any) -> bool:
            self.count += 1
            return plain(meeting, *args)

        Meeting.all_say = all_say  # type: ignore[method-assign]


def alike() -> None:
    """All ranks change what they do: no error. What is known, and what is no collective, asks nobody."""
    asked, block = Asked(), parallel(save_matmuls)
    step(block)
    assert asked.count == 1
    for rows in (4, 8):
        step(block, rows)
    assert asked.count == 1, "other shapes do not count"
    block.twice = True
    step(block)
    assert asked.count == 2, "collectives that were new"
    for twice in (False, True, True):
        block.twice = twice
        step(block)
    assert asked.count == 2


def differing() -> None:
    """A later call does new things on all ranks, and not the same: all raise, and name the difference."""
    rank, answers = dist.get_rank(), []

    @checkpoint_policy
    def sly(info: Any) -> bool:
        if "all_reduce" not in str(info.op):
            return False
        answers.append(0)
        # The first of the second call is the one that is known, and nobody is asked for its sake.
        return len(answers) > 1 and len(answers) % 2 == rank

    block = parallel(sly)
    block.more = True  # so that the last one's result is read
    step(block)
    block.twice = True
    said = rf"keeps other values on other ranks: rank {rank} has .*all_reduce.*, rank {1 - rank} has "
    with pytest.raises(RematError, match=said):
        step(block)


def alone() -> None:
    """A later call does what is new on one rank only: that rank says so, and does not wait for ever."""
    rank, agreement._SECONDS = dist.get_rank(), 2

    @checkpoint_policy
    def sly(info: Any) -> bool:
        return "all_reduce" in str(info.op) and (info.bytes <= 4 * 32 * 4 or rank == 0)

    said = r"on rank 1 what it did in no call before: .*all_reduce.* run again.*within 2 s"
    block, begun = parallel(sly), time.monotonic()
    block.more = True
    step(block)
    if rank == 0:
        forward(block, 8)
    else:
        with pytest.raises(RematError, match=said):
            forward(block, 8)
    assert time.monotonic() - begun < 60


def hybrid() -> None:
    """Shards within pairs, copies of them in the other pair: all four compare, and all raise."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for odd in (1, 2):  # in the same pair of shards as rank 0, and in the other one
        for policies in ((save_nothing, save_matmuls), (save_matmuls, save_matmuls)):
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
            remat.nn.apply(model, layers="*", policy=policies[rank == odd])
            for block in model:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            if policies[0] == policies[1]:
                model(torch.ones(4, 8)).sum().backward()
                continue
            said = rf"other values on other ranks: rank 0 has .*, rank {odd} has "
            with pytest.raises(RematError, match=said):
                model(torch.ones(4, 8)).sum().backward()


class Partial(nn.Module):
    """Blocks of which the last one's result is not read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.left, self.calls, self.bends = [], [], True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        x = self.first(x)
        self.left[:] = [self.last(x)]
        return x.sin() if self.bends else x


def second_run() -> None:
    """A second run ends in the last block, amid what gathers it: that stays gathered until the backward ends,
    and no longer. Lists grow once, and a flag that is turned since is as it was."""
    found = list[Any]()
    for remade in (False, True):
        model = Partial()
        for part in (model.first, model.last, model):
            fully_shard(part)
        call = remat.remat(model.__call__) if remade else model
        for _ in range(2):
            out = call(torch.arange(8.0).view(2, 4).requires_grad_())
            model.bends = not model.bends
            out.square().sum().backward()
        grads = [p.grad.full_tensor() for p in model.first.parameters()]  # type: ignore[union-attr]
        groups = [part._get_fsdp_state()._fsdp_param_group for part in (model.first, model.last)]  # type: ignore
        gathered = [t for group in groups for p in group.fsdp_params for t in p.all_gather_outputs]
        found.append((grads, model.calls, [t.untyped_storage().nbytes() for t in gathered]))
    (want, calls, sizes), (made, again, kept) = found
    torch.testing.assert_close(made, want)
    assert again == calls == [2, 2] and sizes == kept == [0] * len(sizes)


# One rank alone in the last two: the second must not find what the first one said in vain.
CHECKS = {"later": (alike, differing, other_ops, alone), "hybrid": (hybrid,), "sharded": (second_run,)}


def work(rank: int, path: str, size: int, which: str) -> None:
    with group_of(rank, path, size, seconds=60):
        for check in CHECKS[which]:
            check()
            dist.barrier()
