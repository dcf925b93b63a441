"""DeepSpeed: its engine calls a model whose layers are regions, with ZeRO's hooks on its modules."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

PROGRAM = """
import json, sys
import torch
from torch import nn
import deepspeed, remat
from tests.helpers import OpCounter

# It would be built by a compiler, and serves several processes.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
torch.distributed.init_process_group("gloo")
stage, found = int(sys.argv[1]), {}
policies = {"no remat": None, "save_nothing": remat.save_nothing, "save_matmuls": remat.save_matmuls}
for name, policy in policies.items():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    if policy is not None:
        remat.nn.apply(model, layers="layers.*", policy=policy)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"model": model, "optimizer": optimizer, "config": config, "dist_init_required": False}
    engine, *_ = deepspeed.initialize(**options)
    x = torch.randn(4, 16, 32)
    with OpCounter() as counter:
        for _ in range(3):
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
    found[name] = loss.item(), counter.dots
print("found", json.dumps(found))
"""


def trained(stage: int) -> dict[str, object]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29510 + stage), "RANK": "0", "WORLD_SIZE": "1"}
    options = {"LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), **where, **options}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(stage)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert lines, done.stderr[-2000:]
    return json.loads(lines[0][6:])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_are_those_without_remat(stage: int) -> None:
    found = trained(stage)
    loss, dots = found.pop("no remat")  # pyright: ignore[reportGeneralTypeIssues]
    assert {name: pair[0] for name, pair in found.items()} == dict.fromkeys(found, loss)  # pyright: ignore[reportIndexIssue]
    if stage < 3:
        assert found["save_matmuls"][1] == dots < found["save_nothing"][1]  # pyright: ignore[reportIndexIssue]
    else:  # what a policy keeps is not handed out once weights come by other ops than in the forward
        assert dots < found["save_matmuls"][1] <= found["save_nothing"][1]  # pyright: ignore[reportIndexIssue]
