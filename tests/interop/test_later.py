"""Ranks that come to differ after their first call; and four of them, on a mesh of two dimensions."""

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tests.interop import later_worker

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"
)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "which"), [(2, "later"), (4, "hybrid")])
def test_processes(tmp_path, size, which):
    """Two: later calls under tensor parallelism. Four: HSDP."""
    spawn(later_worker.work, args=(str(tmp_path / "store"), size, which), nprocs=size)
