"""Groups of processes, and how wrappers of modules spread those over them.

Private names of torch, each with its reason. Tried on 2.11.0, 2.13.0 and 2.15.0 (CPU).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch

from remat._torch.modules import CALL, CALLED, running


@contextlib.contextmanager
def fake_mesh(sizes: Mapping[str, int]) -> Iterator[Any]:
    """A device mesh of these dimensions on torch's fake process group, as its first rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shape = tuple(sizes.values())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=torch.Size(shape).numel())
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


def process_group(name: str) -> list[int]:
    """The ranks of the group of this name, none where it is not known here."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return []
    try:
        return c10d.get_process_group_ranks(c10d._resolve_process_group(name))
    except (RuntimeError, ValueError):
        return []


def world_store() -> tuple[Any, int] | None:
    """The store by which the processes of this job have met, and this rank; None where it is alone."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized() or c10d.get_backend() == "fake":
        return None
    store = c10d._get_default_store()
    return None if store is None else (store, c10d.get_rank())


def wrapped_in(
    known: Container[torch.nn.Module], untracked: Callable[..., Any]
) -> tuple[torch.nn.Module, str, list[int]] | None:
    """The outermost module around this call whose gradients ranks reduce; None for none, or a `known` one.

    With the qualified name in it of the innermost module that runs, and the ranks. It is one that FSDP,
    `replicate` or DistributedDataParallel has wrapped. `untracked(function)` runs ops that are nobody's.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return None
    modules = running(CALL)
    for root in reversed(modules):
        if root in known:
            return None
        if ranks := _ranks_of(root, c10d, untracked):
            names = {id(module): name for name, module in root.named_modules()}
            return root, next(names[id(module)] for module in modules if id(module) in names), ranks
    return None


def _ranks_of(module: Any, c10d: Any, untracked: Callable[..., Any]) -> list[int]:
    """The ranks among which a wrapper of this module reduces gradients, none where it has no wrapper."""
    if gathers(module):
        # Its own, or (where only the modules in it have parameters) those of the first of them.
        meshes = [group.mesh_info.mesh for m in module.modules() for group in _parameter_groups(m)]
        return untracked(meshes[0].mesh.flatten().tolist) if meshes else []
    composable: Any = sys.modules.get("torch.distributed._composable.replicate")
    if composable is not None and (state := composable.replicate.state(module)) is not None:
        module = getattr(state, "_ddp_weakref", lambda: None)()
    for name in ("torch.nn.parallel.distributed", "torch.distributed.fsdp"):
        there: Any = sys.modules.get(name)
        kinds = [getattr(there, k, None) for k in ("DistributedDataParallel", "FullyShardedDataParallel")]
        if any(kind is not None and isinstance(module, kind) for kind in kinds):
            return c10d.get_process_group_ranks(module.process_group)
    return []


def gathers(module: torch.nn.Module) -> bool:
    """Whether FSDP2 has wrapped a module, so that ranks run it together."""
    return hasattr(module, "_get_fsdp_state")


def accumulating(module: torch.nn.Module) -> list[torch.Tensor]:
    """The leaves of a wrapped module that runs into which a backward may accumulate gradients.

    FSDP1 views the parameters in flat ones, which have the gradients.
    """
    flat = [getattr(getattr(m, "_handle", None), "flat_param", None) for m in module.modules()]
    leaves = [*module.parameters(), *(p for p in flat if p is not None)]
    return [leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf]


def _parameter_groups(module: Any) -> list[Any]:
    """What FSDP2 gathers at once for a module; until torch 2.12 there was one of them."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    if (groups := getattr(state, "_fsdp_param_groups", None)) is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def reduced_in(said: Any, gathered: Any, own: Any) -> Any:
    """The dtype in which FSDP2 reduces gradients: what is said, else the one in which it gathers; since torch
    2.15 the parameters' own."""
    return said or (gathered if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15) else own)


def data_parallel() -> dict[str, Any]:
    """How the innermost module that runs and has such a wrapper is spread, in the words of a layout.

    Only what can be seen, nothing where there is no wrapper.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    for module in running(CALLED) if c10d is not None and c10d.is_initialized() else ():
        if groups := _parameter_groups(module):
            return _spread_by_fsdp(groups[0])
        if ranks := _ranks_of(module, c10d, lambda function: function()):
            strategy = getattr(module, "sharding_strategy", None)
            if strategy is None or strategy.name == "NO_SHARD":
                return {"dp_replicate": len(ranks), "dp_shard": 1}
            return {"dp_shard": len(ranks)}  # FSDP1
    return {}


def _spread_by_fsdp(group: Any) -> dict[str, Any]:
    """By FSDP2; `dtype` is that of the parameters, where mixed precision leaves it as it is."""
    info, first = group.mesh_info, group.fsdp_params[0]
    mixed, dtype = first.mp_policy, first.sharded_param.dtype  # 2.15 has no policy of the group
    gathered = mixed.param_dtype or dtype
    return {
        "dp_replicate": getattr(info, "replicate_mesh_size", 1),
        "dp_shard": getattr(info, "shard_mesh_size", 1),
        "reshard": group._reshard_after_forward,
        "dtype": dtype,
        "param_dtype": gathered,
        "reduce_dtype": reduced_in(mixed.reduce_dtype, gathered, dtype),
    }
