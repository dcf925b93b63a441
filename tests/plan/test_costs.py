"""Prices: FLOPs by formula, seconds by roofline and by stopwatch."""

import json

import pytest
import torch

from remat import RematError
from remat.plan import Flops, Roofline
from tests.plan.inside import DEVICES, Graph, Measured, _table, cost_model, flops_of, record, traffic


def ops(fn, *args):
    joint = record(fn, args)
    return joint, {op.name: op for op in joint.forward}


def test_flops_of_matmuls_convolutions_and_attention():
    x = torch.empty(4, 8, requires_grad=True)
    joint, found = ops(lambda x: x @ x.mT, x)
    assert flops_of(joint, found["aten.mm.default"]) == 2 * 4 * 8 * 4
    image, kernel = torch.empty(2, 3, 8, 8), torch.empty(5, 3, 3, 3, requires_grad=True)
    joint, found = ops(lambda w: torch.nn.functional.conv2d(image, w, padding=1), kernel)
    assert flops_of(joint, found["aten.convolution.default"]) == 2 * 2 * 5 * 8 * 8 * 3 * 9
    q = torch.empty(2, 4, 16, 8, requires_grad=True)
    joint, found = ops(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q), q)
    forward = next(op for op in joint.forward if "attention" in op.name)
    backward = next(op for op in joint.backward if "attention" in op.name)
    assert flops_of(joint, forward) == 4 * 2 * 4 * 16 * 16 * 8
    assert flops_of(joint, backward) == 2.5 * flops_of(joint, forward)


def test_traffic_counts_reads_and_writes_and_no_views():
    joint, found = ops(lambda x: x.view(8, 4).sin(), torch.empty(4, 8, requires_grad=True))
    assert traffic(joint, found["aten.view.default"]) == 0
    assert traffic(joint, found["aten.sin.default"]) == 2 * 4 * 8 * 4


def test_roofline_is_the_larger_of_compute_and_traffic():
    joint, found = ops(lambda x: (x @ x).sin(), torch.empty(64, 64, requires_grad=True))
    speed, model = DEVICES["h100"], Roofline("h100")
    assert model.price(joint, found["aten.sin.default"]) == 2 * 64 * 64 * 4 / speed.bandwidth
    product = model.price(joint, found["aten.mm.default"])
    assert product == max(2 * 64**3 / speed.single, 2 * 64 * 64 * 4 / speed.bandwidth)


def test_fused_chains_cost_their_ends():
    """Between two matmuls the first op reads what a matmul wrote, the last writes what one reads."""
    x = torch.empty(64, 64, requires_grad=True)
    joint, found = ops(lambda x: (x @ x).sin().tanh().cos() @ x, x)
    price = {name: Roofline("h100", fused=True).price(joint, op) for name, op in found.items()}
    one_way = 64 * 64 * 4 / DEVICES["h100"].bandwidth
    assert (price["aten.sin.default"], price["aten.tanh.default"], price["aten.cos.default"]) == (
        one_way,
        0,
        one_way,
    )


def test_a_view_at_the_end_of_a_fused_chain_hides_no_matmul():
    """Linear layers look at their operands as matrices: chains between them moved nothing."""
    x = torch.empty(2, 32, 64, requires_grad=True)
    linear = torch.nn.functional.linear
    joint, found = ops(lambda x, w: linear(linear(x, w).sin().cos(), w), x, torch.empty(64, 64))
    price = {name: Roofline("h100", fused=True).price(joint, op) for name, op in found.items()}
    one_way = 64 * 64 * 4 / DEVICES["h100"].bandwidth
    assert price["aten.sin.default"] == price["aten.cos.default"] == one_way
    assert price["aten.view.default"] == 0


def test_timings_are_taken_once_and_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    _table.cache_clear()
    taken = []
    monkeypatch.setattr(
        "remat.plan.graph.measured.best_seconds", lambda call, device: taken.append(call()) or 0.5
    )
    joint, found = ops(lambda x: (x @ x).sin(), torch.empty(8, 8, requires_grad=True))
    model = Measured("cpu")
    assert [model.price(joint, op) for op in found.values()] == [0.5, 0.5]
    assert [model.price(joint, op) for op in found.values()] == [0.5, 0.5]
    assert len(taken) == 2
    (path,) = tmp_path.iterdir()
    assert sorted(json.loads(path.read_text()).values()) == [0.5, 0.5]
    _table.cache_clear()
    assert model.price(joint, found["aten.sin.default"]) == 0.5 and len(taken) == 2
    _table.cache_clear()


def test_cost_models_by_name():
    assert cost_model("flops") == Flops() and cost_model("roofline", "a100") == Roofline("a100")
    assert cost_model("roofline", "cpu") == Roofline("cpu")
    with pytest.raises(RematError, match='write "flops", "roofline", "measured"'):
        cost_model("vibes")
    with pytest.raises(RematError, match="No roofline for device"):
        Roofline("abacus")


def test_prices_decide_what_is_kept():
    """With bandwidth free a matmul is the dear op, with compute free a copy is."""

    class Only:
        unit = "s"

        def __init__(self, name):
            self.name = name

        def price(self, joint, op):
            return 1.0 if self.name in op.name else 0.001

    def fn(x):
        return (x @ x).sin() + x.exp().cos()

    graph = Graph(record(fn, (torch.empty(32, 32, requires_grad=True),)))
    from tests.plan.inside import solve

    for name, kept in (("mm", "aten.mm.default"), ("exp", "aten.exp.default")):
        solution = solve(graph.problem(Only(name)), 2 * 4096).solution
        assert kept in {graph.names[v] for v in solution.saved if v < len(graph.names)}
