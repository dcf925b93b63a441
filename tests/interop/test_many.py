"""Regions around FSDP1, FSDP2, DistributedDataParallel and `replicate`, and ranks that keep other values, on
two processes."""

import pytest
import torch.distributed as dist

from tests.interop import many_worker
from tests.interop.ranks import spawned


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
def test_two_processes(tmp_path):
    """Gradients bit for bit, bytes at most those of torch's selective checkpoint; no rank waits for ever."""
    spawned(many_worker.work, (str(tmp_path / "store"),))
