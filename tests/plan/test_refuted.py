"""Frontiers that were run: what a point takes, and who refutes it."""

import sys

import pytest
import torch

from remat import RematError
from remat.plan import pareto
from tests.plan.inside import beaten_by, refute
from tests.plan.models import GPTBlock


def test_a_point_is_refuted_by_who_keeps_no_more_and_is_faster_by_far():
    others = [("slow", 10, 2.0), ("fast", 10, 0.5), ("faster", 20, 0.4), ("near", 5, 0.985)]
    assert beaten_by(10, 1.0, others) == "fast"
    assert beaten_by(20, 1.0, others) == "faster"
    assert beaten_by(9, 1.0, others) == "" and beaten_by(4, 9.9, others) == ""


def test_a_measured_frontier_marks_what_the_clock_refutes(monkeypatch):
    """A clock by which everything but one policy takes a second."""
    asked = []

    def clock(fn, args, kwargs, policies, rounds):
        asked.append((len(policies), rounds))
        return [0.5 if repr(policy) == "save_attention" else 1.0 for policy in policies]

    monkeypatch.setattr(sys.modules["remat.plan.pareto"], "measured", clock)
    found = pareto(GPTBlock(32, 4), torch.randn(2, 8, 32), points=4, torch_solvers=(), measure=3)
    (fast,) = found.of("save_attention")
    for point in found.points:
        if point.planner == "bound":
            assert point.seconds is None
        else:
            beaten = point.kept_bytes >= fast.kept_bytes and point is not fast
            assert point.refuted == ("save_attention" if beaten else "")
    assert asked == [(asked[0][0], 3)] and "beaten by" in str(found) and "seconds" in found.to_csv()


def test_measuring_runs_and_leaves_no_trace(monkeypatch):
    runs = []
    step = refute._step
    monkeypatch.setattr(refute, "_step", lambda *call: runs.append(step(*call)))
    block, x = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout()), torch.randn(8, 4)
    mine = block[0].weight.grad = torch.ones(4)
    before, drawn = {k: v.clone() for k, v in block.state_dict().items()}, torch.get_rng_state()
    found = pareto(block, x, points=2, torch_solvers=(), measure=2)
    assert all(point.seconds is not None for point in (*found.of("remat"), *found.of("save_nothing")))
    assert len(runs) % 5 == 0
    assert all(torch.equal(v, before[k]) for k, v in block.state_dict().items())
    assert torch.equal(drawn, torch.get_rng_state())
    assert block[0].weight.grad is mine and mine.eq(1).all() and block[0].bias.grad is None


def test_what_has_no_data_cannot_be_measured():
    x = torch.empty(4, 4, device="meta", requires_grad=True)
    with pytest.raises(RematError, match="measure=True runs the function"):
        pareto(lambda x: (x @ x).sin(), x, torch_solvers=(), measure=True)
