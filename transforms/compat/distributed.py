"""Process groups that stand in for a job's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch


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
