"""FSDP2 blocks with the region around the sharded module, on two processes."""

import pytest
import torch.distributed as dist

from tests.interop import fsdp_worker
from tests.interop.ranks import spawned


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
def test_gradients_of_sharded_parameters(tmp_path):
    spawned(fsdp_worker.work, (str(tmp_path / "store"),))
