"""Plans on ranks whose data-parallel mesh is another one: on a fake process group, and on two processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.mesh import Decoder
from remat import RematError, nn as remat_nn
from tests.helpers import sparse
from tests.plan import mesh_worker
from tests.plan.test_layout import NEEDS_GLOO, TINY, TOKENS, _spawned, tiny


@pytest.fixture
def four_ranks():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def trained(plan, *, mesh=(4,), wrapped=True, last: Any = None, compiled: str | None = None, **options):
    model: Any = remat_nn.apply(Decoder(TINY, TOKENS[1]), plan=plan)
    if compiled == "blocks":
        for layer in model.layers.values():
            layer.compile(backend="aot_eager", fullgraph=True)
    if wrapped:
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
        for layer in model.layers.values():
            own = {"reshard_after_forward": False} if layer is model.layers["2"] and last else {}
            fully_shard(layer, **{**options, **own})
        fully_shard(model, **options)
    run = torch.compile(model, backend="aot_eager") if compiled == "model" else model
    run(torch.zeros(TOKENS, dtype=torch.long)).sum().backward()


@pytest.mark.slow
def test_the_mesh_that_was_planned(four_ranks):
    trained(tiny(dp_shard=4))
    trained(tiny(dp_shard=4), last=True)
    trained(tiny(dp_shard=2, dp_replicate=2), mesh=(2, 2))
    trained(tiny(dp_shard=4, reshard=False), reshard_after_forward=False)
    trained(tiny(dp_shard=4, param_dtype=torch.float32), mp_policy=MixedPrecisionPolicy())
    trained(tiny(dp_replicate=4), wrapped=False)


LESS = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("layout", "options", "said"),
    sparse(
        pytest.param(*row)
        for row in [
            ({"dp_shard": 4}, {"mesh": (2, 2)}, "dp_shard=2, planned was dp_shard=4"),
            ({"dp_shard": 2, "dp_replicate": 2}, {}, "dp_shard=4, planned was dp_shard=2"),
            ({"dp_replicate": 4}, {}, "dp_shard=4, planned was dp_shard=1"),
            ({"dp_shard": 4}, {"wrapped": False}, "dp_shard=1, planned was dp_shard=4"),
            ({"dp_shard": 4}, {"reshard_after_forward": False}, "reshard=False, planned was reshard=True"),
            ({"dp_shard": 4}, {"mp_policy": LESS}, "reduce_dtype=torch.bfloat16, planned was .*float32"),
        ]
    ),
)
def test_another_mesh(four_ranks, layout, options, said):
    with pytest.raises(RematError, match=f"does not fit rank 0: block layers.0 .* is trained with {said}"):
        trained(tiny(**layout), **options)


# (Dynamo itself looks at the gradient of what is no leaf.)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_compiled_code_compares_the_mesh(four_ranks, compiled):
    """Where Dynamo traces a block."""
    torch._dynamo.reset()
    said = "block layers.0 .* is trained with reshard=False, planned was reshard=True"
    with pytest.raises(BackendCompilerFailed, match=f"does not fit rank 0: {said}"):
        trained(tiny(dp_shard=4), reshard_after_forward=False, compiled=compiled)


def test_ranks_are_counted_without_a_process_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(RematError, match=r"there are 8 ranks \(WORLD_SIZE\), planned were 4"):
        remat_nn.apply(Decoder(TINY, TOKENS[1]), plan=tiny(dp_shard=4))
    monkeypatch.setenv("WORLD_SIZE", "4")
    remat_nn.apply(Decoder(TINY, TOKENS[1]), plan=tiny(dp_shard=4))


@NEEDS_GLOO
@pytest.mark.slow
def test_all_ranks_raise(tmp_path):
    """One of two does not shard its blocks as planned."""
    tiny(dp_shard=2).save(tmp_path / "plan.json")
    said = "rank 1: block layers.0 (stage 0) is trained with reshard=False, planned was reshard=True"
    assert all(said in one for one in _spawned(mesh_worker.other_mesh, tmp_path, TINY))
