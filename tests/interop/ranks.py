"""What every process of a distributed test does around its checks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes


def spawned(work: Callable[..., None], args: tuple[Any, ...], ranks: int = 2) -> None:
    """Run `work(rank, *args)` in so many processes, until all end or one raises.

    They are forks of a process that has imported everything once and has run nothing.
    """
    multiprocessing.set_forkserver_preload(["tests.interop.layouts_worker"])
    start_processes(work, args=args, nprocs=ranks, start_method="forkserver")


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
