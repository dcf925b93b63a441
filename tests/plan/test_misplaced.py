"""Plans where they do not belong: of another mesh, of more than a region, of one region alone."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.mesh import Decoder, Sizes, planned, tensor_parallel
from remat import RematError, checkpoint_policy, fit, nn as remat_nn, remat, save_matmuls
from remat.plan import Layout

ONE = Sizes(layers=1, width=32, heads=4, groups=2, hidden=64, vocab=64)
TOKENS = (2, 16)


@functools.cache
def tiny(**layout):
    return planned(ONE, TOKENS, Layout(**layout), memory="1GiB")


def decoder():
    return Decoder(ONE, TOKENS[1])


@pytest.mark.slow
def test_another_mesh(monkeypatch):
    """Ranks are counted where there is a group; a rank's ops are compared in its first forward."""
    parts = remat_nn.apply(decoder(), plan=tiny(tp=2, parallelize=tensor_parallel))
    with pytest.raises(RematError, match=r"op \d+ of block layers.0 .* planned was (_c10d|aten)"):
        parts(torch.zeros(TOKENS, dtype=torch.long))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(RematError, match="there are 2 ranks, planned were 4"):
        tiny(dp_shard=4).policies(decoder(), together=False)


@pytest.mark.filterwarnings("ignore:A budget of 0.6 is below")
@pytest.mark.parametrize("made", ["mesh", "model", "chain"])
def test_a_plan_of_more_than_a_region_is_no_policy(made):
    """The message is short, and says what to write."""
    x = torch.ones(8, 8, requires_grad=True)
    block = remat(torch.sin, policy=checkpoint_policy(budget=0.5))
    plans = {
        "mesh": tiny,
        "model": lambda: fit(lambda x: block(block(x)), x, budget=0.6),
        "chain": lambda: fit([torch.sin, torch.exp], x, peak="2KiB"),
    }
    plan = plans[made]()
    uses = {
        "is not the policy of one region: .*(apply|call it)": [
            lambda: remat(torch.sin, policy=plan),
            lambda: checkpoint_policy(plan),
            lambda: remat_nn.apply(decoder(), policy=plan),
            lambda: save_matmuls | plan,
            lambda: fit(nn.Sequential(nn.Linear(8, 8)), x, peak="1GiB", layers=nn.Linear, policies=[plan]),
        ],
        "A budget is a share": [lambda: checkpoint_policy(budget=plan)],
        "A peak is a positive": [lambda: checkpoint_policy(peak=plan)],
    }
    if made != "mesh":
        uses["got a .*write a remat.plan.MeshPlan"] = [lambda: remat_nn.apply(decoder(), plan=plan)]
    for message, calls in uses.items():
        for call in calls:
            with pytest.raises(RematError, match=message) as caught:
                call()
            assert len(str(caught.value)) < 350


def test_the_file_of_a_plan_for_one_region(tmp_path):
    x = torch.ones(8, 8, requires_grad=True)
    plan = checkpoint_policy(budget=0.5, cost="flops").plan(lambda x: (x @ x).tanh() @ x, x)
    (tmp_path / "plan.json").write_text(plan.to_json())
    with pytest.raises(RematError, match="it is one of Plan.to_json, for one region: policy="):
        remat_nn.apply(decoder(), plan=tmp_path / "plan.json")
