"""What every process of a distributed test does around its checks."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def group_of(rank: int, path: str, size: int = 2, seconds: int | None = None) -> Iterator[None]:
    """A gloo group of `size` processes that meet in a file; after so many seconds this process ends, where
    others would wait for ever."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if seconds is not None:
        hangs = threading.Timer(seconds, os._exit, (1,))
        hangs.daemon = True
        hangs.start()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    yield
    dist.destroy_process_group()
