"""Scans compiled for a GPU that is not there: launches, kept and live bytes of their steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import RematError, remat, save_matmuls, save_nothing, scan_remat
from remat.gpu import GpuGraph, GpuReport, Simulation, compile_for, trace
from tests.compile.inside import lowered
from tests.inside import trace_memory
from tests.rotary import rotate

WIDE = 256
CARRY = WIDE * WIDE * 4  # bytes


@pytest.fixture(autouse=True)
def triton(request):
    if "cpu" not in request.node.name:
        pytest.importorskip("triton", reason="Triton compiles for GPUs: pip install 'remat[gpu]'")


def body(x: Tensor, weights: Any) -> tuple[Tensor, None]:
    up, down = weights
    return x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ up) @ down, None


def scanned(step=body, **options):
    def loss(x: Tensor, weights: Any) -> Tensor:
        return scan_remat(step, x, weights, **options)[0].square().sum()

    return loss


def report(n: int, loss=None, *, graded: bool = True, **options) -> GpuReport:
    x, w = torch.empty(WIDE, WIDE, device="meta"), torch.empty(n, WIDE, WIDE, device="meta")
    weights = w.requires_grad_(graded), torch.empty_like(w, requires_grad=graded)
    return compile_for("h100", loss or scanned(**options), x, weights, machine_code=False)


def launches(graph: GpuGraph | None) -> Counter[str]:
    assert graph is not None
    return Counter(kernel.name for kernel in graph.kernels)


@pytest.mark.slow
def test_a_block_is_lowered_once_and_launched_for_every_step():
    few, many = report(4, checkpoints="all"), report(7, checkpoints="all")
    for before, after in ((few.forward, many.forward), (few.backward, many.backward)):
        assert before and after and len(before.blocks) == len(after.blocks) == 1
        # A block of one step: each of its kernels as often as it is run.
        for name, count in (launches(after) - launches(before)).items():
            assert count % 3 == 0, name
        text = after.blocks[0]
        own = {name: count for name, count in launches(after).items() if name in text}
        assert own and all(count >= 7 for count in own.values())
    # Both products of a step in the forward. In the backward four gradients, and the first product anew.
    assert few.forward and few.backward
    assert launches(few.forward)["aten.mm"] + launches(few.forward)["aten.addmm"] == 2 * 4
    assert launches(few.backward)["aten.mm"] + launches(few.backward)["aten.addmm"] == 5 * 4


@pytest.mark.slow
def test_rotary_tables_are_computed_once_in_a_block():
    """Not in each kernel that reads them: of the queries, the keys, and what is pulled back."""

    def turned(x: Tensor) -> Tensor:
        return rotate(x.unflatten(-1, (-1, 4)).transpose(-2, -3)).transpose(-2, -3).flatten(-2)

    def attending(x: Tensor, weights: Any) -> tuple[Tensor, None]:
        up, down = weights
        return turned(x @ up) * turned(x @ down) + x, None

    found = report(4, scanned(attending, policy=save_matmuls, checkpoints="all"))
    for graph in (found.forward, found.backward):
        assert graph and len(graph.blocks) == 1
        kernels = graph.blocks[0].split("async_compile.triton")
        # The cosine is in a kernel of its own, or beside the sine.
        assert len([text for text in kernels if "sin(" in text]) == 1
        assert "tl_math.cos(" in graph.blocks[0] and graph.blocks[0].count("_math.sin(") == 1


@pytest.mark.slow
def test_kept_are_the_carries_of_the_schedule():
    kept = {count: report(6, checkpoints=count).kept for count in (2, 3, "all")}
    # The first is the caller's. A tape of every step has the last one too.
    assert kept[3] - kept[2] == CARRY and kept["all"] - kept[2] == 5 * CARRY
    stays, away = (report(6, checkpoints="all", offload=there) for there in (False, True))
    # In host memory they take nothing of the card's. Each comes back, and before a step as after one.
    assert kept["all"] - away.kept == 6 * CARRY
    fetched = launches(away.backward) - launches(stays.backward)
    assert fetched == Counter({"aten.copy_": 6 + 5})
    assert away.forward and stays.forward and away.forward.peak < stays.forward.peak


@pytest.mark.slow
def test_a_policy_keeps_products_of_steps():
    nothing, products = (report(6, checkpoints="all", policy=p) for p in (save_nothing, save_matmuls))
    # The first product is read by its gradient. Of the second only the sum with the carry is, which is there.
    assert products.kept - nothing.kept == 6 * CARRY
    assert nothing.flops - products.flops == 6 * 2 * WIDE**3


@pytest.mark.slow
def test_a_functional_step_and_regions_in_steps():
    def step(x, weights):
        return remat(lambda x, up, down: body(x, (up, down))[0], name="inner")(x, *weights), None

    loss = scanned(step, checkpoints=3)
    found = report(6, lambda x, ws: torch.func.grad(lambda ws: loss(x, ws))(ws), graded=False)
    assert found.step and found.survived and len(found.step.blocks) == 2
    assert [region.region for region in found.regions] == ["inner"] and found.regions[0].ops["mm"] == 1
    assert found.step.not_capturable.startswith("remat.scan_forward.default, at ")
    assert "test_gpu_scans.py:" in found.step.not_capturable


@pytest.mark.slow
def test_steps_left_over_from_blocks_are_refused():
    x, w = torch.empty(4, 4, device="meta"), torch.empty(11, 4, 4, device="meta", requires_grad=True)
    loss = scanned(lambda c, w: (torch.tanh(c @ w), None))
    with pytest.raises(RematError, match="The 3 left over .* Take 8 steps, or 16"):
        compile_for("h100", loss, x, w, machine_code=False)


@pytest.mark.slow
def test_live_bytes_of_a_scan_on_the_cpu_are_those_of_the_profiler():
    x, weights = torch.randn(1024, 64), (torch.randn(8, 64, 256) / 8, torch.randn(8, 256, 64) / 16)
    leaves = [w.requires_grad_() for w in weights]
    loss = scanned(checkpoints="all", policy=save_matmuls)
    traces, _ = trace(loss, (x, weights), {})
    assert traces.forward is not None and traces.backward is not None
    run = Simulation(lowered(traces.forward, None, False, False), None, traces.blocks)
    peak = run.execution.peak
    run.backward(lowered(traces.backward, None, True, False, traces.donated))
    peak = max(peak, run.execution.peak)

    def compiler(module, inputs):
        # Not by its name: scans know Inductor, and hand it their blocks in a way that only CPUs take.
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(module, inputs)

    step = torch.compile(loss, backend=compiler, fullgraph=True)
    torch.autograd.grad(step(x, weights), leaves)
    found = trace_memory(lambda mark: torch.autograd.grad(step(x, weights), leaves)).peak
    assert abs(peak - found) <= 0.02 * found
