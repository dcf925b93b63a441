# %% [markdown]
# # FSDP2 on two processes
#
# A model sharded over two processes on a CPU, trained with AdamW. Regions come first, then `fully_shard`,
# layer by layer. Layers are the unit of both: a layer's parameters are gathered for its recomputation and
# let go after it.
#
#     python examples/fsdp2.py

# %%
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import remat
from remat import save_matmuls, save_nothing
from remat.cli.measure import trace_memory


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


# %% [markdown]
# One process: build, make regions, shard, train. It returns what its first step kept, and its losses.


# %%
def train(rank, policy):
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(4)])
    if policy is not None:
        remat.apply(model, layers=Layer, policy=policy)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(256, 32) + rank
    losses = []

    def step(mark):
        loss = model(x).square().mean()
        mark()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    step(lambda: None)  # the first step also makes what the sharding needs
    kept = trace_memory(step).kept
    step(lambda: None)
    return kept, losses


def work(rank, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    expected = None
    for name, policy in {
        "no remat": None,
        "save_nothing": save_nothing,
        "save_matmuls": save_matmuls,
    }.items():
        kept, losses = train(rank, policy)
        expected = expected or losses
        assert losses == expected
        if rank == 0:
            print(f"{name:<14}{kept:>10} bytes kept on each process, losses equal")
    # While all wait here, gloo's threads let go of the last tensors; at exit they could not.
    dist.monitored_barrier()
    dist.destroy_process_group()


# %%
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (Path(folder) / "meeting",), nprocs=2)
