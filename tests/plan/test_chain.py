"""Chains: what the dynamic program finds, and that the engine does what it says."""

import itertools
import random
import re

import pytest
import torch

from benchmarks.planner.models import MODELS, gpt
from remat import RematError, fit
from remat.plan import Flops
from tests.plan.inside import Chain, Choice, Part, Stage, best_parts
from tests.plan.models import MLP, Attention, Watch

MODELS["GPT 16"] = lambda: gpt(16)

# -- the search, on numbers ---------------------------------------------------------------------------------


def chains(seed, count):
    """A chain of random stages, some pairs of which have plans of their own."""
    draw = random.Random(seed)

    def choice(cost, kept, input):
        forward = kept + draw.randrange(6)
        return Choice(frozenset(), cost, cost, kept, forward, kept + draw.randrange(8) + input)

    def plans(cost, input):
        made = [choice(cost, input, input)]
        for _ in range(draw.randrange(3)):
            made.append(choice(draw.randrange(cost), input + draw.randrange(1, 6), input))
        return tuple(made)

    def stage():
        whole, input = draw.randrange(2, 9), draw.randrange(1, 4)
        needed = draw.randrange(1, whole + 1)
        plain = choice(0, input + draw.randrange(2, 9), input)
        return Stage(plans(needed, input), plain, whole, whole, input, draw.randrange(3))

    stages = [stage() for _ in range(count)]
    if draw.random() < 0.5:
        stages = [stages[0]] * count
    joined = {
        (k, k + 2): plans(stages[k].whole + stages[k + 1].choices[0].cost, stages[k].input)
        for k in range(count - 1)
        if draw.random() < 0.5
    }
    return Chain(stages, joined)


def again(chain, start, stop):
    """All ways to run stages again and backward."""
    if chain.plans(start, stop):
        yield (Part(start, stop),)
    for cut in range(start + 1, stop):
        firsts = [Part(start, cut, parts=inside) for inside in again(chain, start, cut)]
        if cut == start + 1:
            firsts.append(Part(start, cut))
        for first, rest in itertools.product(firsts, list(again(chain, cut, stop))):
            yield (first, *rest)


def first(chain, start):
    """All ways to run the stages from `start` on."""
    if start == len(chain.stages):
        yield ()
        return
    for stop in range(start + 1, len(chain.stages) + 1):
        parts = [Part(start, stop, k) for k in range(len(chain.plans(start, stop)))]
        parts += [Part(start, stop, parts=inside) for inside in again(chain, start, stop)]
        for part, rest in itertools.product(parts, list(first(chain, stop))):
            yield (part, *rest)


@pytest.mark.parametrize("seed", range(12))
def test_no_parts_are_better_than_those_found(seed):
    chain = chains(seed, 1 + seed % 4)
    every = [(chain.peak(parts), chain.cost(parts)) for parts in first(chain, 0)]
    lowest, highest = min(peak for peak, _ in every), max(peak for peak, _ in every)
    assert chain.lowest() == lowest and best_parts(chain, lowest - 1) is None
    for limit in range(lowest, highest + 1):
        found = best_parts(chain, limit)
        assert found is not None and chain.peak(found) <= limit
        assert chain.cost(found) == min(cost for peak, cost in every if peak <= limit)


# -- the engine ---------------------------------------------------------------------------------------------


def halves(count=3, width=32, dropout=0.0):
    torch.manual_seed(0)
    stages = [m for _ in range(count) for m in (Attention(width, 4, dropout), MLP(width, dropout))]
    return stages, torch.randn(4, 64, width)


def through(stages):
    def run(x):
        for stage in stages:
            x = stage(x)
        return x

    return run


def gradients(fn, stages, x):
    for stage in stages:
        stage.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    fn(x).square().sum().backward()
    found = [x.grad, *(p.grad for stage in stages for p in stage.parameters())]
    return [grad for grad in found if grad is not None]


def lowest_of(stages, x, **options):
    with pytest.raises(RematError, match="cannot be met by this chain") as error:
        fit(stages, x, peak=1000, **options)
    return int(re.findall(r"peak=(\d+)", str(error.value))[0])


def watched(fn, stages, x):
    """Live bytes and FLOPs of one step, over its input, its result and the result's gradient."""
    for stage in stages:
        stage.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_() * 1
    seed = torch.ones_like(x)
    with Watch() as watch:
        y = fn(x)
        y.backward(seed)
    return watch.peak - y.nbytes, watch.flops


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.1, 1.5])
def test_the_engine_keeps_to_the_plan(share):
    stages, x = halves()
    x = x.requires_grad_() * 1
    plan = fit(stages, x, peak=int(share * lowest_of(stages, x)), cost="flops")
    expected = gradients(through(stages), stages, x.detach())
    assert all(map(torch.equal, gradients(plan, stages, x.detach()), expected))
    plain = watched(through(stages), stages, x.detach())[1]
    for _ in range(2):
        # The input is among the plan's bytes, and lives before.
        peak, flops = watched(plan, stages, x.detach())
        assert 0.9 * plan.peak_bytes < peak + x.nbytes <= plan.peak_bytes
        assert flops - plain == plan.recomputed_flops


@pytest.mark.slow
def test_the_lowest_peak_takes_nested_regions():
    stages, x = halves(6)
    x = x.requires_grad_() * 1
    plan = fit(stages, x, peak=lowest_of(stages, x), cost="flops")
    nested = [part for part in plan.parts if any(inside.parts for inside in part.parts)]
    assert nested and "recomputed as a whole from its input, then\n    " in str(plan)
    every_half = fit(stages, x, peak="1GiB").default_bytes
    assert plan.kept_bytes < every_half / 5


@pytest.mark.slow
def test_random_numbers_are_the_same_when_they_run_for_the_third_time():
    stages, x = halves(2, dropout=0.3)
    plan = fit(stages, x.requires_grad_() * 1, peak=lowest_of(stages, x * 1))
    results = []
    for fn in (through(stages), plan):
        torch.manual_seed(3)
        results.append(gradients(fn, stages, x.detach()))
    assert all(map(torch.equal, *results))


@pytest.mark.slow
def test_under_compile_and_torch_func():
    stages, x = halves(2)
    expected = gradients(through(stages), stages, x)
    traced = x.requires_grad_() * 1
    peak = int(1.1 * lowest_of(stages, traced, compiled=False))
    plan = fit(stages, traced, peak=peak, compiled=False)
    run = torch.compile(lambda x: plan(x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(run, stages, x.detach()), expected)
    pulled = torch.func.grad(lambda x: plan(x).square().sum())(x.detach())
    torch.testing.assert_close(pulled, expected[0])


@pytest.mark.slow
def test_stages_may_use_torch_func_inside():
    """torch.func refuses the hooks on saved tensors by which a look sees what autograd keeps."""

    class Force(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(16, 16) / 4)

        def forward(self, x):
            h = torch.tanh(x @ self.w) @ self.w
            return torch.func.grad(lambda a: torch.tanh(a @ self.w).sum())(h) * h

    torch.manual_seed(0)
    stages, x = [Force() for _ in range(3)], torch.randn(64, 16, requires_grad=True)
    kept = []
    for peak in ("1GiB", int(1.1 * lowest_of(stages, x * 1))):
        plan = fit(stages, x * 1, peak=peak)
        kept.append(plan.kept_bytes)
        theirs = gradients(through(stages), stages, x.detach())
        torch.testing.assert_close(gradients(plan, stages, x.detach()), theirs)
    assert kept[0] > kept[1]


@pytest.mark.slow
def test_trees_and_what_all_stages_share():
    def stage(state, scale, shift):
        return {"x": torch.tanh(state["x"] @ state["w"]) * scale + shift, "w": state["w"]}

    w = torch.randn(16, 16, requires_grad=True)
    state = {"x": torch.randn(64, 16), "w": w}
    scale = torch.randn(16, requires_grad=True)
    plan = fit([stage] * 6, state, scale, 0.5, peak="1GiB", cost=Flops())
    low = int(1.2 * lowest_of([lambda x: stage(x, scale, 0.5)] * 6, state))
    lean = fit([stage] * 6, state, scale, 0.5, peak=low, cost=Flops())
    assert lean.kept_bytes < plan.kept_bytes

    def run(s):
        for _ in range(6):
            s = stage(s, scale, 0.5)
        return s

    pairs = [
        torch.autograd.grad(fn["x"].sum(), (w, scale))
        for fn in (run(state), plan(state, scale, 0.5), lean(state, scale, 0.5))
    ]
    torch.testing.assert_close(pairs[1:], [pairs[0]] * 2, rtol=0, atol=0)


def test_what_cannot_be_planned():
    with pytest.raises(RematError, match="remat.fit got no stages"):
        fit([], torch.ones(2), peak="1GiB")
    with pytest.raises(RematError, match="positive number of bytes, got 0.5"):
        fit([torch.sin], torch.ones(2, requires_grad=True), peak=0.5)  # type: ignore[arg-type]
    with pytest.raises(RematError, match="cannot be planned"):
        fit([lambda x: x * x.sum().item()], torch.ones(2, requires_grad=True), peak=100)
