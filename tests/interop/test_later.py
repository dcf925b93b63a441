"""Ranks that come to differ after their first call; and four of them, on a mesh of two dimensions."""

import pytest
import torch.distributed as dist

from tests.interop import later_worker
from tests.interop.ranks import spawned

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"
)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "which"), [(2, "later"), (4, "hybrid"), (2, "sharded")])
def test_processes(tmp_path, size, which):
    """Two: later calls under tensor parallelism; second runs under FSDP2. Four: HSDP."""
    spawned(later_worker.work, (str(tmp_path / "store"), size, which), size)
