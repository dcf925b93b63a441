"""Regions on several processes, laid out as in `docs/distributed.md`."""

import pytest
import torch.distributed as dist

from tests.interop import layouts_worker
from tests.interop.ranks import spawned

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        (4, ["HSDP", "FSDP2 x TP"]),
        (2, ["TP + SP", "Expert parallel", "Pipeline 1F1B", "Pipeline ZBVZeroBubble"]),
    ],
)
def test_beside_torch(tmp_path, size, layouts):
    """Gradients are those without remat, bit for bit. Beside torch's checkpoint with the same verdicts no
    more is kept, and what is sent is the same. FSDP2, tensor and sequence parallelism are on a mesh of two
    dimensions."""
    spawned(layouts_worker.beside_torch, (str(tmp_path / "store"), size, layouts), size)
