"""Regions inside the real trainers, on two processes where they spread a model."""

import pytest
import torch.distributed as dist

from tests.interop.ranks import spawned

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"
)


@pytest.mark.slow
def test_torchtitan_on_two_processes(tmp_path):
    """`parallelize_llama`, FSDP2 and tensor parallelism, eager and compiled by block: gradients equal."""
    pytest.importorskip("torchtitan")
    pytest.importorskip("triton", reason="torchtitan's models import it")
    from tests.interop import titan_worker

    spawned(titan_worker.work, (str(tmp_path / "store"),))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["accelerate", "Trainer", "lightning"])
def test_trainers_on_two_processes(tmp_path, which):
    """accelerate with FSDP2; Hugging Face's Trainer and Lightning under DDP: equal weights."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate" if which == "Trainer" else which)
    from tests.interop import trainers_worker

    spawned(trainers_worker.work, (str(tmp_path), which, trainers_worker.free_port()))
