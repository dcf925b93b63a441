# %% [markdown]
# # Tensor parallelism and FSDP2 on two processes
#
# The blocks' matrices are split over two processes (tensor parallelism, with the sequence sharded between
# blocks), and the layers at both ends are sharded by FSDP2. Regions come last under tensor parallelism, and
# first under FSDP2. The first process also trains the whole model alone, to compare.
#
#     torchrun --nproc-per-node 2 examples/fsdp2_tp.py    # or: python examples/fsdp2_tp.py

# %%
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import remat
from remat import save_collectives, save_matmuls, save_nothing
from remat.cli.measure import trace_memory

WIDTH, LENGTH = 64, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.mesh = None

    def forward(self, x):
        x = self.first(x)
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(1)]).to_local()
        for block in self.blocks:
            x = block(x)
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Shard(1)]).full_tensor()
        return self.last(x)


# %% [markdown]
# One process: build, shard, make regions, train. It returns what its second step kept, and its losses.


# %%
def parallel(model, mesh):
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    for end in (model.first, model.last):
        fully_shard(end, mesh=mesh)
    model.mesh = mesh


def train(policy, mesh=None):
    torch.manual_seed(0)
    model = Model()
    if mesh is not None:
        parallel(model, mesh)
    if policy is not None:
        remat.apply(model, layers="blocks.*", policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x, losses = torch.randn(4, LENGTH, WIDTH), []

    def step(mark):
        loss = model(x).square().mean()
        mark()
        loss.backward()
        losses.append(loss.item())

    for _ in range(3):
        kept = trace_memory(step).kept
        optimizer.step()
        optimizer.zero_grad()
    return kept, losses


def work():
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    mesh, expected = init_device_mesh("cpu", (2,)), None
    policies = {
        "no remat": None,
        "save_nothing": save_nothing,
        "save_matmuls | save_collectives": save_matmuls | save_collectives,
    }
    for name, policy in policies.items():
        kept, losses = train(policy, mesh)
        expected = expected or losses
        assert losses == expected
        if dist.get_rank() == 0:
            alone, whole = train(policy)
            torch.testing.assert_close(losses, whole, rtol=1e-4, atol=1e-5)
            said = ", ".join(f"{loss:.4f}" for loss in losses)
            print(f"{name:<32}{kept:>8} bytes kept by each, {alone:>8} by one alone; losses equal: {said}")
    # While all wait here, gloo's threads let go of the last tensors; at exit they could not.
    dist.monitored_barrier()
    dist.destroy_process_group()


# %%
if __name__ == "__main__":
    if "RANK" in os.environ:
        work()
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*launcher, os.path.abspath(__file__)], check=True)
