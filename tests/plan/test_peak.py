"""Budgets on the peak: simulated live bytes through forward and backward."""

import re

import pytest
import torch
import torch.nn.functional as F

from remat import RematError, checkpoint_policy, fit, remat
from remat.plan import BudgetPolicy, Flops, Plan
from remat.policies import Policy
from tests.inside import trace_memory
from tests.plan.inside import (
    Measure,
    graph_of,
    highest_within,
    plan_graph,
    planned_for,
    profile,
    record,
    step_peak,
    torch_solution,
    workspace,
)
from tests.plan.models import GPTBlock, Watch


def budgeted(policy: Policy) -> BudgetPolicy:
    assert isinstance(policy, BudgetPolicy)
    return policy


def deep(batch=2):
    model = torch.nn.Sequential(*[GPTBlock(32, 4) for _ in range(3)])
    return model, torch.randn(batch, 32, 32, requires_grad=True)


def compiled_plan(model, x, **options):
    """The plan for a region in compiled code."""
    return plan_graph(graph_of(model, (x * 1,)), BudgetPolicy(**options), "deep", compiled=True)


@pytest.mark.slow
def test_in_eager_a_region_runs_again_as_a_whole():
    """Whatever it keeps, its own peak is that of all its values; what it keeps matters to other regions."""
    model, x = deep(8)
    peaks = [BudgetPolicy(b).plan(model, x * 1).peak_bytes for b in (0, 0.4, 0.8)]
    assert max(peaks) < 1.01 * min(peaks)
    for budget, planned in zip((0, 0.4, 0.8), peaks, strict=True):
        region = remat(model, policy=checkpoint_policy(budget=budget))
        y = region(given := x * 1)
        seed = torch.ones_like(y)
        with Watch() as watch:
            y.backward(seed)
        # What lived before the backward is among the bytes of the plan, and goes as the backward reads it.
        kept = BudgetPolicy(budget).plan(model, given).kept_bytes
        assert watch.peak <= planned <= watch.peak + kept + seed.nbytes
        model.zero_grad(set_to_none=True)


@pytest.mark.slow
def test_at_the_peaks_of_torchs_plans_ours_are_no_dearer():
    """At every peak that torch's own plans reach."""
    model, x = deep(8)
    graph = graph_of(model, (x * 1,))
    problem = graph.problem(Flops())
    for share in (0.09, 0.1, 0.3):
        theirs = torch_solution(graph, problem, share)
        peak = step_peak([profile(graph, theirs, compiled=True)])
        ours = compiled_plan(model, x, budget=1.0, peak=peak, cost="flops")
        assert ours.cost <= theirs.cost and ours.peak_bytes <= peak


def test_peaks_that_do_not_rise_with_the_budget():
    """What fits is looked for from the top; a wider limit still finds no lower budget."""

    def peak(budget):
        return 90 if budget < 10 else 50 + budget // 8 + 6 * (budget // 10 % 2)

    found = [highest_within(limit, 0, 160, lambda b: b, peak) for limit in range(52, 80)]
    assert found == sorted(found) and all(
        peak(b) <= limit for b, limit in zip(found, range(52, 80), strict=True)
    )
    assert len(set(found)) > 10
    with pytest.raises(RematError, match="lowest that was found is 52 bytes"):
        highest_within(10, 0, 160, lambda b: b, peak)


def test_in_compiled_code_what_runs_again_is_counted():
    """The argument, the gradient of the result and three values are there at once, kept or made again."""
    x = torch.ones(1024, requires_grad=True)
    for budget in (0, 1.0):
        plan = compiled_plan(lambda x: x.sin().exp().tanh(), x, budget=budget, cost="flops")
        assert plan.peak_bytes == 5 * x.nbytes


def test_gradients_under_a_peak_are_those_without():
    model, x = deep()
    low, high = (BudgetPolicy(b).plan(model, x * 1).peak_bytes for b in (0, 1.0))
    region = remat(model, policy=checkpoint_policy(peak=(low + high) // 2))
    grads = []
    for fn in (model, region):
        model.zero_grad()
        fn(x * 1).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


@pytest.mark.slow
def test_peak_beside_a_budget_keeps_to_both():
    model, x = deep()
    plan = budgeted(checkpoint_policy(budget=0.5, peak="1GiB")).plan(model, x * 1)
    assert 0 < plan.kept_bytes <= plan.default_bytes / 2
    assert plan == BudgetPolicy(0.5).plan(model, x * 1)
    assert Plan.from_json(plan.to_json()).peak_bytes == plan.peak_bytes > plan.kept_bytes


@pytest.mark.slow
def test_a_model_plan_within_a_peak():
    model, x = deep()
    regions = [remat(block, policy=checkpoint_policy(budget=0.5)) for block in model]

    def through(x):
        for region in regions:
            x = region(x)
        return x

    low, high = (fit(through, x, budget=b).peak_bytes for b in (0, 1.0))
    plans = [fit(through, x, peak=p) for p in range(low, high, (high - low) // 6)]
    costs = [plan.cost for plan in plans]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]
    with pytest.raises(RematError, match="lowest that was found is") as error:
        fit(through, x, peak=1000)
    lowest = int(re.findall(r"peak=(\d+)", str(error.value))[0])
    assert lowest <= low and fit(through, x, peak=lowest).peak_bytes == lowest
    with pytest.raises(RematError, match=f"lowest that was found is {lowest:,} bytes"):
        fit(through, x, peak=lowest - 1)


@pytest.mark.parametrize(
    ("peak", "message"),
    [
        (0, "positive number of bytes, got 0"),
        (-5, "positive number of bytes"),
        (0.5, "positive number of bytes, got 0.5"),
        (True, "positive number of bytes, got True"),
        ("lots", "'lots' is not a peak"),
    ],
)
def test_bad_peaks(peak, message):
    with pytest.raises(RematError, match=message):
        checkpoint_policy(peak=peak)
    with pytest.raises(RematError, match=message):
        BudgetPolicy(1.0, peak=peak)


def test_what_a_convolution_takes_inside_counts_on_a_cpu():
    """oneDNN's copies, read from the profiler; a kernel of one pixel takes none."""
    layer, x = torch.nn.Conv2d(32, 16, 3, padding=1), torch.randn(2, 32, 16, 16, requires_grad=True)
    joint = record(layer, (x,))
    (forward,) = (op for op in joint.forward if "convolution" in op.name)
    (back,) = (op for op in joint.backward if "convolution" in op.name)
    inputs, outputs = 2 * 32 * 256 * 4, 2 * 16 * 256 * 4
    assert workspace(joint, forward) == inputs + 16 * 32 * 9 * 4
    assert workspace(joint, back) == inputs + outputs
    made = []
    found = trace_memory(lambda mark: made.append(layer(x)))
    assert found.peak == outputs + workspace(joint, forward)
    pointwise = record(torch.nn.Conv2d(32, 16, 1), (x,))
    assert not any(workspace(pointwise, op) for op in pointwise.ops)


@pytest.mark.parametrize(
    "fn", [lambda x: x.log_softmax(1), lambda x: x.softmax(1), lambda x: F.layer_norm(x, x.shape[2:])]
)
@pytest.mark.parametrize("look", [lambda x: x, lambda x: x[:, :-1], lambda x: x[:, :-1].mT])
def test_copies_of_what_is_not_contiguous_count_on_a_cpu(fn, look):
    """Some kernels make them: of logits of which the last is left out, say, or with classes in the middle."""
    x = torch.randn(4, 65, 256, requires_grad=True)
    joint = record(lambda x: fn(look(x)), (x,))
    inside = sum(workspace(joint, op) for op in joint.forward)
    assert inside == (0 if look(x).is_contiguous() else look(x).nbytes)
    made = []
    found = trace_memory(lambda mark: made.append(fn(look(x))))
    assert 0 <= found.peak - look(x).nbytes - inside < 16384  # (means and deviations)


def test_what_kernels_take_inside_on_a_card():
    """As an H100 took it under torch 2.11.0 with cuDNN 9.19 (`max_memory_allocated` around the op)."""
    with torch.device("meta"):
        image = torch.empty(32, 128, 64, 64, dtype=torch.bfloat16, requires_grad=True)
        same, half = (torch.nn.Conv2d(128, 128, 3, s, 1, dtype=torch.bfloat16, bias=False) for s in (1, 2))
        pixel = torch.nn.Conv2d(128, 128, 1, dtype=torch.bfloat16, bias=False)
        rows = torch.empty(8, 1024, 768, dtype=torch.bfloat16)
    inside = lambda fn, x: [workspace(joint, op) / 2**20 for joint in [record(fn, (x,))] for op in joint.ops]  # noqa: E731
    # A convolution lets the channels come last: its operand, its weight, and its result.
    forward, back = inside(same, image)
    assert forward == pytest.approx(64.3, rel=0.01) and back == pytest.approx(71.6, rel=0.12)
    assert inside(half, image)[0] == pytest.approx(40.3, rel=0.01)
    assert not any(inside(pixel, image) + inside(same, image.to(memory_format=torch.channels_last)))
    assert not any(inside(same.float(), image.float()))
    # The gradient of a bias.
    assert inside(lambda x: x.sum((0, 1)), rows) == [48] and inside(lambda x: x.sum(0), rows[0, :, :512]) == [
        4
    ]
    assert not any(inside(lambda x: x.sum(-1), rows) + inside(lambda x: x.sum(0), rows[0, :64]))
    with planned_for("cpu"):
        assert inside(lambda x: x.sum((0, 1)), rows) == [0]


def test_gradients_are_added_up_in_place():
    """As autograd does: of a value that is read three times, one gradient and its sum are there at a time."""

    def fn(x):
        y = x * 2.0
        return (y.sin() + y.cos() + y.tanh()).sum()

    x = torch.randn(64, 64, requires_grad=True)
    graph = graph_of(fn, (x,))
    adds = [op for op in graph.joint.backward if op.name == "aten.add.Tensor"]
    assert len(adds) == 2
    plain = Measure(graph, Flops()).stage().plain
    found = trace_memory(lambda mark: torch.autograd.grad(fn(x), x))
    assert max(plain.forward, plain.backward) == pytest.approx(found.peak, abs=64)
