"""Regions on several processes: what each keeps, sends and computes again, and whether gradients are alike.

    python -m benchmarks.many_devices --write    # prints the tables, and writes docs/measured/layouts.md
    python -m benchmarks.many_devices --layouts TP --policies none,save_matmuls

Processes are on this machine's CPU and talk by gloo. Bytes and counts are those of one process.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import remat
from benchmarks.many_devices.models import Block, Experts, Stack
from benchmarks.many_devices.pipelines import SCHEDULES, Piped
from remat import checkpoint_policy, save_collectives, save_matmuls, save_names, save_nothing
from remat.cli.measure import Work, trace_memory

_c10d = torch.ops._c10d_functional
# What torch's selective checkpoint keeps beside it: our save_matmuls, by names of ops.
SAC = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
SAC_COLLECTIVES = [*SAC, _c10d.reduce_scatter_tensor.default, _c10d.all_to_all_single.default]
POLICIES: dict[str, Any] = {
    "none": None,
    "torch checkpoint": "checkpoint",
    "torch SAC (matmuls)": SAC,
    "torch SAC (matmuls and collectives)": SAC_COLLECTIVES,
    "save_nothing": save_nothing,
    "save_matmuls": save_matmuls,
    "save_matmuls \\| save_collectives": save_matmuls | save_collectives,
    "save_names": save_names("attention"),
    "budget=0.5": checkpoint_policy(budget=0.5),
}


class Checkpointed(nn.Module):
    """A module under torch's checkpoint, or a region around its call."""

    def __init__(self, inner: nn.Module, policy: Any) -> None:
        super().__init__()
        self.inner = inner
        self.options: dict[str, Any] | None = None
        if isinstance(policy, (str, list)):
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            self.options = {"context_fn": contexts} if isinstance(policy, list) else {}
        else:
            self.region = remat.remat(inner.__call__, policy=policy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.options is None:
            return self.region(x)
        # (By now FSDP may have put another module there.)
        return checkpoint(self.inner, x, use_reentrant=False, **self.options)


def with_policy(model: Stack, policy: Any, around: bool = False) -> None:
    """Make each block a region, or put it into torch's checkpoint."""
    if policy is None:
        return
    if around or isinstance(policy, (str, list)):
        model.layers = nn.ModuleList([Checkpointed(layer, policy) for layer in model.layers])
    else:
        remat.nn.apply(model, layers="layers.*", policy=policy)


# -- layouts: each takes a model and a policy, and gives the model that trains --------------------------


def ddp(model: Stack, policy: Any) -> nn.Module:
    with_policy(model, policy)
    return nn.parallel.DistributedDataParallel(model)


def fsdp1(model: Stack, policy: Any) -> nn.Module:
    with_policy(model, policy)
    wrapped = ModuleWrapPolicy({Block})
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    return FullyShardedDataParallel(model, auto_wrap_policy=wrapped, **options)


def fsdp2(model: Stack, policy: Any, around: bool, mesh: Any = None) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    if not around:
        with_policy(model, policy)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if around:
        with_policy(model, policy, around=True)
    return model


def hsdp(model: Stack, policy: Any) -> nn.Module:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)
    return fsdp2(model, policy, False, mesh)


def tensor_parallel(model: Stack, policy: Any, sequence: bool, mesh: Any = None) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    rows = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": rows,
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": rows,
    }
    if sequence:
        norm = SequenceParallel()
        plan |= {"norm1": norm, "norm2": norm, "attention": gather, "mlp": gather}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
        layer.attention.heads //= mesh.size()
    with_policy(model, policy)
    model.sharded = mesh if sequence else None
    return model


def fsdp2_tp(model: Stack, policy: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, policy, True, mesh["tp"])
    return fsdp2(model, None, False, mesh["dp"])


def experts(model: Stack, policy: Any) -> nn.Module:
    for layer in model.layers:
        layer.mlp = Experts(layer.mlp, dist.group.WORLD)
    with_policy(model, policy)
    return model


def piped(name: str) -> Callable[..., nn.Module]:
    return lambda _, policy: Piped(name, policy, with_policy)


LAYOUTS: dict[str, tuple[int, Callable[..., nn.Module]]] = {
    "DDP": (2, ddp),
    "FSDP1": (2, fsdp1),
    "FSDP2 (region inside)": (2, functools.partial(fsdp2, around=False)),
    "FSDP2 (region around)": (2, functools.partial(fsdp2, around=True)),
    "HSDP": (4, hsdp),
    "TP": (2, functools.partial(tensor_parallel, sequence=False)),
    "TP + SP": (2, functools.partial(tensor_parallel, sequence=True)),
    "FSDP2 x TP": (4, fsdp2_tp),
    "Expert parallel": (2, experts),
    **{f"Pipeline {name}": (2, piped(name)) for name in SCHEDULES},
}


# -- one measurement -----------------------------------------------------------------------------------


class Sent(Work):
    """Counts ops as `Work` does, and collectives by their kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the ops on local tensors come here
        if any(kind.__name__ == "FakeTensor" for kind in types):
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
        for kind, marks in _KINDS.items():
            if func.namespace in ("c10d", "_c10d_functional") and name.startswith(marks):
                self.sent[kind] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


_KINDS = {
    "all-gather": ("all_gather", "allgather", "_allgather"),
    "reduce-scatter": ("reduce_scatter", "_reduce_scatter"),
    "all-reduce": ("all_reduce", "allreduce"),
    "all-to-all": ("all_to_all", "alltoall"),
    "send": ("send",),
}


def measure(layout: str, policy: Any, steps: int = 2) -> dict[str, Any]:
    """Trains a few steps; what the last one kept and sent, and the gradients of all, local parts of them."""
    torch.manual_seed(0)
    model = Stack()
    made = LAYOUTS[layout][1](copy.deepcopy(model), policy)
    torch.manual_seed(1 + (0 if "TP" in layout else dist.get_rank()))
    x = torch.randn(2, 32, 64)
    found: list[torch.Tensor] = []

    def step(mark: Callable[[], None] = lambda: None) -> None:
        if isinstance(made, Piped):
            return made.step(mark)
        loss = made(x).square().sum()
        mark()
        loss.backward()

    def trace() -> Any:
        made.zero_grad()
        return trace_memory(step)

    for _ in range(steps):
        made.zero_grad()
        step()
        grads = [p.grad for p in made.parameters() if p.grad is not None]
        found += [(g.to_local() if isinstance(g, DTensor) else g).clone() for g in grads]
    # Memory that a thread of gloo frees is not seen to go: the least of some runs is what there is.
    traces = [trace() for _ in range(2)]
    made.zero_grad()
    with Sent() as work:
        step()
    kept, peak = min(t.kept for t in traces), min(t.peak for t in traces)
    return {"kept": kept, "peak": peak, "sent": work.sent, "work": work, "gradients": found}


def rows(layout: str, names: list[str], steps: int = 2) -> list[dict[str, Any]]:
    """Measurements of one layout, `none` first, which the others are compared with."""
    made: list[dict[str, Any]] = []
    for name in dict.fromkeys(["none", *names]):
        row: dict[str, Any] = {"policy": name}
        try:
            row |= measure(layout, POLICIES[name], steps)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            made.append(row)
            continue
        plain = made[0] if made else row
        pairs = zip(row["gradients"], plain["gradients"], strict=True)
        row["difference"] = max(float((a - b).abs().max()) for a, b in pairs)
        row["recomputed"] = (row["work"].ops - plain["work"].ops).total()
        made.append(row)
    return made


def work(rank: int, folder: str, world: int, layouts: list[str], names: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    for layout in layouts:
        table = rows(layout, names)
        if rank == 0:
            text = "\n".join([title(layout), "", HEAD, *map(line, table)])
            print(f"\n{text}", flush=True)
            (Path(folder) / f"{layout}.md").write_text(text + "\n")
    # While all wait here, gloo's threads let go of the last tensors; at exit they could not.
    dist.monitored_barrier()
    dist.destroy_process_group()


def title(layout: str) -> str:
    """The heading of a table."""
    return f"### {layout}, {LAYOUTS[layout][0]} processes"


def written(page: str, tables: dict[str, str]) -> str:
    """The page with these tables in the place of those of the same layouts."""
    text, *sections = page.split("\n### ")
    by_title = {f"### {part}".splitlines()[0]: f"### {part}".rstrip() + "\n" for part in sections}
    by_title |= {title(layout): table for layout, table in tables.items()}
    order = [by_title[name] for name in map(title, LAYOUTS) if name in by_title]
    return "\n".join([text.rstrip() + "\n", *order])


HEAD = """\
| policy | kept KiB | peak KiB | collectives in a step | ops run again | gradient difference |
|---|---|---|---|---|---|"""


def line(row: dict[str, Any]) -> str:
    """A row of a table."""
    if "error" in row:
        return f"| {row['policy']} | raises {row['error']} | | | | |"
    sent = ", ".join(f"{count} {kind}" for kind, count in sorted(row["sent"].items()))
    kept, peak = (f"{row[key] / 1024:.1f}" for key in ("kept", "peak"))
    return f"| {row['policy']} | {kept} | {peak} | {sent} | {row['recomputed']} | {row['difference']:g} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--write", action="store_true", help="put the tables into docs/measured/layouts.md")
    given = parser.parse_args()
    layouts = given.layouts.split(",")
    tables: dict[str, str] = {}
    for world in sorted({LAYOUTS[name][0] for name in layouts}):
        mine = [name for name in layouts if LAYOUTS[name][0] == world]
        with tempfile.TemporaryDirectory() as folder:
            spawn(work, (folder, world, mine, given.policies.split(",")), nprocs=world)
            tables |= {name: (Path(folder) / f"{name}.md").read_text() for name in mine}
    if given.write:
        page = Path("docs/measured/layouts.md")
        page.write_text(written(page.read_text(), tables))
