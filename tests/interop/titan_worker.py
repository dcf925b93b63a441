"""What each of two processes does for `test_packages.py`: torchtitan's own Llama, spread by its own code."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims as titan_dims  # type: ignore[reportMissingImports]
import torchtitan.models.llama3 as llama3  # type: ignore[reportMissingImports]
from torch._dynamo.utils import counters
from torchtitan.config import (  # type: ignore[reportMissingImports]
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed.activation_checkpoint import (  # type: ignore[reportMissingImports]
    FullAC,
    SelectiveAC,
)
from torchtitan.models.common.attention import (  # type: ignore[reportMissingImports]
    ScaledDotProductAttention,
)
from torchtitan.models.llama3.sharding import (  # type: ignore[reportMissingImports]
    set_llama3_sharding_config,
)

from remat import nn as remat_nn
from remat.debug import assert_recomputed
from remat.interop.torchtitan import PolicyAC
from tests.inside import trace_memory

# Its other backends need a newer torch, or inputs as DTensors.
BACKEND = "partial_dtensor"
KEPT = {
    "default": PolicyAC.Config(),
    "nothing": PolicyAC.Config(policy="save_nothing"),
    "matmuls": PolicyAC.Config(policy="save_matmuls | save_attention | save_collectives"),
    "budget": PolicyAC.Config(budget=0.5),
}
# torchtitan's own that keep the same.
SAME = {"nothing": FullAC.Config(), "default": SelectiveAC.Config()}


def config() -> Any:
    """torchtitan's model for debugging, of two blocks, with the attention that a CPU has."""
    llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()
    found = llama3.llama3_configs["debugmodel"](attn_backend="sdpa")
    found.layers = found.layers[:2]
    set_llama3_sharding_config(found, enable_sp=True)
    return found


def parallel(tensor: int, kept: Any, compiled: bool = False) -> Any:
    """The model after `parallelize_llama`, with torchtitan's initial weights."""
    parallelism = ParallelismConfig(tensor_parallel_degree=tensor, spmd_backend=BACKEND)
    dims = titan_dims.ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    with torch.device("meta"):
        model = config().build()
    llama3.parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        # As Inductor, which would take longer.
        compile_config=CompileConfig(
            enable=compiled, backend="aot_eager_decomp_partition", components=["model"]
        ),
        ac_config=kept,
        dump_folder="",
    )
    for module in model.modules():
        # gloo cannot scale while it reduces.
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def train(model: Any, tensor: int) -> tuple[list[torch.Tensor], int]:
    """The gradients of a step, and what further ones keep (what threads of gloo free is missed)."""
    generator = torch.Generator().manual_seed(0 if tensor > 1 else dist.get_rank())
    tokens = torch.randint(0, 2048, (2, 32), generator=generator)

    def step(mark: Any = lambda: None) -> None:
        out = model(tokens)
        loss = (out.to_local() if hasattr(out, "to_local") else out).square().mean()
        mark()
        loss.backward()

    step()
    grads = [(g.to_local() if hasattr(g, "to_local") else g).clone() for g in _grads(model)]
    kept = []
    for _ in range(12):
        model.zero_grad()
        kept.append(trace_memory(step).kept)
    return grads, min(kept)


def unique_graphs() -> int:
    """How many graphs Dynamo has made; none from now on."""
    found = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    return found


def _grads(model: Any) -> list[Any]:
    return [p.grad for p in model.parameters()]


def trained(tensor: int, compiled: bool, kinds: tuple[str, ...]) -> None:
    plain = parallel(tensor, None, compiled)
    names, (expected, most), graphs = list(plain.state_dict()), train(plain, tensor), unique_graphs()
    for name in kinds:
        model = parallel(tensor, KEPT[name], compiled)
        assert remat_nn.regions(model) == ["layers.0", "layers.1"] and list(model.state_dict()) == names
        found, kept = train(model, tensor)
        assert kept < most, (name, kept, most)
        if compiled:
            assert not counters["graph_break"] and unique_graphs() == graphs, (name, tensor)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
        else:
            assert all(map(torch.equal, found, expected)), (name, tensor)
        if name in SAME and not compiled:
            theirs = train(parallel(tensor, SAME[name]), tensor)[1]
            assert kept <= theirs, (name, tensor, kept, theirs)


def survives() -> None:
    """What a block recomputes is in its compiled code."""
    for name, ops in (("nothing", ["exp", "mm"]), ("matmuls", ["exp"])):
        torch.manual_seed(0)
        model = config().build()
        model.init_weights(buffer_device=None)
        PolicyAC(KEPT[name]).apply(model)
        assert_recomputed(model.layers["0"], torch.randn(2, 32, 256, requires_grad=True), None, ops=ops)


def work(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    titan_dims.device_type = "cpu"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    trained(1, False, ("nothing", "matmuls"))
    trained(2, False, ("nothing", "budget", "default"))
    trained(1, True, ("matmuls",))
    trained(2, True, ("nothing",))
    if rank == 0:
        survives()
    dist.destroy_process_group()
