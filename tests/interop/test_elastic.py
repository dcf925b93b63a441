"""Checkpoints of sharded regions, and a restart from one after a process has died."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load

from tests.interop import elastic_worker


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
def test_a_restart_goes_on_from_a_checkpoint(tmp_path):
    """Two processes save; one dies, both start again; one without regions loads what they end with."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = ["--max-restarts", "1", "--monitor-interval", "0.1"]
    script = str(Path(elastic_worker.__file__))
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*launcher, *settings, script, str(tmp_path)],
        # Torchrun hands every attempt the same store, in which a process that starts early reads the dead
        # one's address (torch 2.13: "connection refused"). Each attempt's own store has nothing old.
        env={**os.environ, "PYTHONPATH": root, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "attempts").read_text() == "1 from 1"

    expected, optimizer = elastic_worker.built()
    for at in range(elastic_worker.STEPS):
        elastic_worker.step(expected, optimizer, at, 0, 1)
    found, _ = elastic_worker.built()
    state = {"model": found.state_dict()}
    load(state, checkpoint_id=tmp_path / str(elastic_worker.STEPS), no_dist=True)
    found.load_state_dict(state["model"])
    torch.testing.assert_close(dict(found.named_parameters()), dict(expected.named_parameters()))
