"""Regions under DistributedDataParallel, on two processes; known torch bugs of this seam: test_seams.py."""

import pytest
import torch.distributed as dist

from tests.interop import ddp_worker
from tests.interop.ranks import spawned


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
def test_a_region_that_runs_twice(tmp_path):
    """Gradients of every step, and batch norm's statistics, with and without a static graph."""
    spawned(ddp_worker.work, (str(tmp_path / "store"),))
