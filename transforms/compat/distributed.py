"""Sharded tensors, and process groups that stand in for a job's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def sharded_kinds() -> tuple[type, ...]:
    """`DTensor`, and the results of collectives under way, once their modules are loaded: wrappers of a
    tensor of this rank's."""
    tensor = sys.modules.get("torch.distributed.tensor")
    functional = sys.modules.get("torch.distributed._functional_collectives")
    found = getattr(tensor, "DTensor", None), getattr(functional, "AsyncCollectiveTensor", None)
    return tuple([kind for kind in found if kind is not None])


def local_tensor(tensor: Any) -> Any:
    """This rank's part of a sharded tensor (with `to_local` it would be a view with a history)."""
    while isinstance(tensor, sharded_kinds()):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


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
