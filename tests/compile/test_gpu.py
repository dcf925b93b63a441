"""Steps compiled for a GPU that is not there: kernels, spills, live bytes, errors."""

from __future__ import annotations

import functools
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common.models import Around, named
from remat import RematError, remat, save_matmuls, save_nothing
from remat.gpu import Simulation, compile_for, trace
from tests.compile.inside import lowered
from tests.helpers import TORCH
from tests.inside import trace_memory

DEPTH = 3


@pytest.fixture
def triton():
    pytest.importorskip("triton", reason="Triton compiles for GPUs: pip install 'remat[gpu]'")


class Block(nn.Module):
    """GPT's, 256 wide."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def network(wrap):
    with torch.device("meta"):
        blocks = nn.ModuleList(Block() for _ in range(DEPTH)).bfloat16()

    def step(x: Tensor) -> Tensor:
        for block in blocks:
            x = wrap(block)(x)
        return x.float().square().mean()

    return step, torch.empty(2, 512, 256, dtype=torch.bfloat16, device="meta")


def extern(graph) -> Counter[str]:
    return Counter(kernel.name for kernel in graph.kernels if kernel.kind == "extern")


@pytest.mark.slow
def test_regions_run_the_forward_once_more_and_cost_nothing_else(triton):
    # Torch remembers which kernel attention had in an earlier trace.
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="aot_eager")(x)
    plain = compile_for("h100", *network(lambda block: block))
    ours = compile_for("h100", *network(remat))
    assert plain.forward and plain.backward and ours.forward and ours.backward
    assert ours.survived and len(ours.regions) == DEPTH and not plain.regions
    assert ours.kept < plain.kept / 5 and ours.peak < plain.peak and ours.fits
    # Every product and attention once more, but the last product, which no gradient reads.
    again = extern(ours.backward) - extern(plain.backward)
    assert again == Counter({"aten.addmm": 3 * DEPTH, "aten._scaled_dot_product_cudnn_attention": DEPTH})
    assert extern(ours.forward) == extern(plain.forward)
    # A fence is no kernel and no copy.
    launched = [Counter(k.kind for k in graph.kernels)["triton"] for graph in (plain.forward, plain.backward)]
    assert Counter(k.kind for k in ours.backward.kernels)["triton"] <= sum(launched)
    assert "= torch.ops.remat.fence" not in ours.backward.source and "copy" not in str(extern(ours.backward))
    # No kernel spills more than without remat.
    spills = [max(kernel.spills or 0 for kernel in report.kernels) for report in (plain, ours)]
    assert spills[1] <= spills[0]
    assert all(k.cubin and k.registers for k in ours.kernels if k.kind == "triton")


@pytest.mark.slow
def test_recomputation_spills_no_more_and_runs_no_kernel_twice(triton):
    small = named("moe", depth=1, width=128, heads=4, seq=128, batch=2)
    problem = small.problem(torch.device("cpu"), torch.bfloat16, 0)

    def compiled(wrap):
        loss, leaves = problem.bind(Around(wrap))
        report = compile_for("h100", loss, leaves(problem.params), problem.batch)
        assert report.forward and report.backward and report.survived
        spills = max(kernel.spills or 0 for kernel in report.kernels)
        return extern(report.forward), extern(report.backward), spills

    forward, backward, spills = compiled(lambda fn: fn)
    products = {"aten.mm", "aten.addmm", "aten.bmm"}
    assert products & set(forward)
    for policy, again in ((save_nothing, True), (save_matmuls, False)):
        ours = compiled(partial(remat, policy=policy))
        more = ours[1] - backward
        assert ours[0] == forward and ours[2] <= spills
        assert not more - forward and bool(products & set(more)) is again


def mlp(up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    return x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ up) @ down


def mlp_under(wrap):
    region = wrap(mlp)

    def loss(weights, x: Tensor) -> Tensor:
        for up, down in weights:
            x = region(up, down, x)
        return x.square().sum()

    return loss


@pytest.mark.slow
def test_live_bytes_of_the_cpu_wrapper_are_those_of_the_profiler():
    weights = [(torch.randn(64, 256) / 8, torch.randn(256, 64) / 16) for _ in range(4)]
    leaves = [w.requires_grad_() for pair in weights for w in pair]
    x, loss = torch.randn(1024, 64), mlp_under(remat)
    traces, _ = trace(loss, (weights, x), {})
    assert traces.forward is not None and traces.backward is not None
    run = Simulation(lowered(traces.forward, None, False, False), None)
    peak = run.execution.peak
    run.backward(lowered(traces.backward, None, True, False, traces.donated))
    peak = max(peak, run.execution.peak)
    step = torch.compile(loss, fullgraph=True)
    torch.autograd.grad(step(weights, x), leaves)
    found = trace_memory(lambda mark: torch.autograd.grad(step(weights, x), leaves)).peak
    assert abs(peak - found) <= 0.02 * found


@pytest.mark.slow
def test_a_backward_is_lowered_with_the_strides_of_the_forwards_code():
    """Inductor lays a convolution's channels last, and AOTAutograd tells the backward."""
    weight, x = torch.randn(8, 8, 3, 3, requires_grad=True), torch.randn(2, 8, 8, 8)

    def loss(weight, x):
        return F.conv2d(F.silu(F.conv2d(x, weight, padding=1)), weight, padding=1).square().sum()

    traces, _ = trace(loss, (weight, x), {})
    assert traces.forward is not None and traces.backward is not None
    first = lowered(traces.forward, None, False, False)
    code = lowered(traces.backward, None, True, False, traces.donated, first.strides)
    given = {n: v.stride() for n, v in zip(code.names, code.inputs, strict=True) if n in first.strides}
    assert given == {name: first.strides[name] for name in given}
    assert any(len(stride) == 4 and stride[1] == 1 for stride in given.values())


@pytest.mark.slow
def test_a_functional_step_is_one_graph(triton):
    step = torch.func.grad(lambda w, x: remat(lambda w, x: torch.tanh(x @ w).sin())(w, x).sum())
    w, x = torch.empty(64, 64, device="meta"), torch.empty(32, 64, device="meta")
    report = compile_for("a100", step, w, x, machine_code=False)
    assert report.step is not None and report.forward is None and report.survived


@pytest.mark.slow
@pytest.mark.skipif(TORCH >= (2, 14), reason="both kernels of this example are cut alike there")
def test_recomputed_reductions_in_other_blocks_are_told(triton):
    @remat(policy=save_matmuls)
    def normed(x, weights):
        h = F.rms_norm(x, x.shape[-1:])
        return functools.reduce(torch.add, [(h @ w).sin() for w in weights]).softmax(-1)

    def told(count: int) -> tuple[str, ...]:
        step = lambda x, weights: normed(x, weights).float().square().sum()  # noqa: E731
        x = torch.empty(1024, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
        weights = [torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta") for _ in range(count)]
        return compile_for("h100", step, x, weights, machine_code=False).differing

    assert not told(1)
    # Fused with a sum of eight cotangents, the mean has smaller blocks than in the forward.
    found = told(8)
    assert found and "aten.mean.dim of region 'normed', at " in found[0] and "R0_BLOCK" in found[0]


@pytest.mark.slow
def test_products_that_sum_over_more_run_faster(triton):
    shapes = (4096, 512), (512, 8192), (8192, 4096)
    operands = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    step = lambda x, up, down: ((x @ up) @ down).float().sum()  # noqa: E731
    report = compile_for("h100", step, operands[0].requires_grad_(), *operands[1:])
    assert report.forward
    products = [kernel for kernel in report.forward.kernels if kernel.name == "aten.mm"]
    short, long = [product.flops / product.seconds for product in products]
    assert short < long < 989e12  # an H100's in bfloat16


@pytest.mark.slow
def test_what_only_gives_a_shape_is_not_lost(triton):
    """The backward of a pooling reads the shape of its input: the convolution that makes it does not run."""
    region = remat(lambda x, w: x + F.conv2d(F.silu(F.conv2d(x, w, padding=1)), w, padding=1))

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return region(F.avg_pool2d(region(x, w), 2), w).square().sum()

    x = torch.empty(2, 8, 16, 16, device="meta", requires_grad=True)
    w = torch.empty(8, 8, 3, 3, device="meta", requires_grad=True)
    report = compile_for("h100", loss, x, w, machine_code=False)
    assert report.survived and [region.ops["convolution"] for region in report.regions] == [1, 1]


@pytest.mark.slow
def test_flex_attention_and_kernels_of_users_are_compiled(triton):
    from torch.nn.attention.flex_attention import flex_attention

    from tests.compile.triton_kernel import Added

    def causal(score, b, h, i, j):
        return torch.where(i >= j, score, -float("inf"))

    def attended(x, w):
        return Added.apply(flex_attention(x @ w, x, x, score_mod=causal), x).sin()

    def step(x, w):
        return remat(attended)(remat(attended)(x, w), w).float().sum()

    x = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    w = torch.empty(64, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    report = compile_for("b200", step, x, w)
    assert report.forward and report.backward and report.survived
    assert [region.ops["flex_attention"] for region in report.regions] == [1, 1]
    for graph in (report.forward, report.backward):
        names = [kernel.name for kernel in graph.kernels]
        assert sum("add_kernel" in name for name in names) == 2
        assert sum("flex_attention" in name for name in names) >= 2
    assert any(kernel.cubin for kernel in report.kernels if "flex_attention" in kernel.name)


def test_a_machine_without_triton_is_told_which_to_install(monkeypatch):
    monkeypatch.setattr("remat.gpu.compile.triton_wanted", lambda: "triton==3.7.0")
    with pytest.raises(RematError, match=r"pip install triton==3\.7\.0"):
        compile_for("h100", lambda x: x, torch.ones(2))


def test_an_unknown_card_is_told():
    with pytest.raises(RematError, match="a100, h100, h200, b200"):
        compile_for("tpu", lambda x: x, torch.ones(2))


@pytest.mark.slow
def test_a_graph_break_is_told_with_its_line():
    def step(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RematError, match=r"one graph, at .*test_gpu\.py:\d+"):
        trace(step, (x,), {})
    # What the step can reach is as it was.
    assert type(x) is Tensor and x.grad is None
