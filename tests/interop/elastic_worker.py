"""What torchrun starts for `test_elastic.py`: training that saves each step, and dies once amid the second.

torchrun --nproc-per-node 2 --max-restarts 1 tests/interop/elastic_worker.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import remat
from remat import save_collectives, save_matmuls

STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def built() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """The model and its optimizer, of which a process has the whole."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, at: int, rank: int, world: int) -> None:
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(at))[rank::world]
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def agree() -> None:
    """A region that sends: its ranks compare what they keep, again after a restart."""
    torch.manual_seed(0)
    block = Block()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, init_device_mesh("cpu", (2,)), plan)
    remat.nn.apply_to(block, policy=save_matmuls | save_collectives)
    block(torch.ones(2, 8)).sum().backward()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    agree()
    model, _ = built()
    remat.nn.apply(model, layers="*", policy=save_matmuls)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = len(list(folder.glob("*/.metadata")))  # what is saved as a whole has one
    if first:
        parts, moments = get_state_dict(model, optimizer)
        state = {"model": parts, "optimizer": moments}
        load(state, checkpoint_id=folder / str(first))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for at in range(first, STEPS):
        step(model, optimizer, at, dist.get_rank(), 2)
        if at == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
            os._exit(1)
        parts, moments = get_state_dict(model, optimizer)
        save({"model": parts, "optimizer": moments}, checkpoint_id=folder / str(at + 1))
    if dist.get_rank() == 0:
        (folder / "attempts").write_text(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} from {first}")
    dist.destroy_process_group()
    # A thread of torch's that still runs would abort a process that ends by itself (now and then, exit -6).
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
