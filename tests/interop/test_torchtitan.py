"""`PolicyAC`, in torchtitan or in what stands for it; with its own models: `test_packages.py`."""

import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.mesh import Decoder
from remat import Decision, OpInfo, nn as remat_nn, saved_residuals
from tests.plan.test_layout import TINY, TOKENS, tiny

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class ActivationCheckpointing:
    @dataclass(kw_only=True, slots=True)
    class Config:
        preserve_rng_state: bool = True
        determinism_check: str = "default"

    def __init__(self, config):
        self.config = config

    def apply(self, model):
        for layer in model.layers.children():
            self._wrap_block(layer)  # type: ignore[attr-defined]


class SelectiveAC(ActivationCheckpointing):
    def get_save_ops(self):
        sent = {c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default}
        return {aten.mm.default, aten.linear.default, aten.bmm.default, aten.topk.default, *sent}


@pytest.fixture
def titan(monkeypatch):
    """The module of `PolicyAC`."""
    name = "torchtitan.distributed.activation_checkpoint"
    try:
        __import__(name)
    except ImportError:
        stands = types.SimpleNamespace(
            ActivationCheckpointing=ActivationCheckpointing, SelectiveAC=SelectiveAC
        )
        monkeypatch.setitem(sys.modules, name, stands)
    import remat.interop.torchtitan as found

    yield found
    del sys.modules["remat.interop.torchtitan"]


class Sends(nn.Module):
    """Three matrix products, and collectives behind them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        group: Any = dist.group.WORLD
        first, second, third = self.layers
        x = second(first(x).sin()).sin()
        x = third(reduce_scatter_tensor_autograd(x, "sum", 0, group).sin()).sin()
        return all_to_all_single_autograd(x, None, None, group).sin()


# (Torch has renamed one of the collectives.)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_by_default_it_keeps_what_torchtitan_keeps(titan):
    """Every second product, reduce-scatters and all-to-alls; a policy that is named keeps what it says."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        kept = {}
        for policy in (None, "save_matmuls | save_collectives", "save_weight_matmuls"):
            model = nn.Module()
            model.layers = nn.ModuleList([Sends()])
            titan.PolicyAC(titan.PolicyAC.Config(policy=policy)).apply(model)
            assert remat_nn.regions(model) == ["layers.0"]
            found = saved_residuals(model.layers[0], torch.randn(4, 8))
            kept[policy] = [r.op.overloadpacket for r in found if r.why == "policy"]
    finally:
        dist.destroy_process_group()
    product, scatter, exchange = aten.mm, c10d.reduce_scatter_tensor, c10d.all_to_all_single
    assert kept[None] == [product, scatter, product, exchange]
    assert kept["save_matmuls | save_collectives"] == [product, product, scatter, product, exchange]
    assert kept["save_weight_matmuls"] == [product] * 3


def test_the_default_recomputes_all_reduces_and_all_gathers(titan):
    policy = titan.PolicyAC(titan.PolicyAC.Config()).policy()
    ops = [c10d.all_reduce.default, c10d.all_gather_into_tensor.default, aten.topk.default]
    assert [policy(OpInfo(op, (), {}, ())) for op in ops] == [*[Decision.RECOMPUTE] * 2, Decision.SAVE]


@pytest.mark.slow
def test_a_plan(titan, tmp_path):
    tiny().save(tmp_path / "plan.json")
    model = Decoder(TINY, TOKENS[1])
    titan.PolicyAC(titan.PolicyAC.Config(plan=str(tmp_path / "plan.json"))).apply(model)
    assert remat_nn.regions(model) == ["layers.0", "layers.1", "layers.2"]
