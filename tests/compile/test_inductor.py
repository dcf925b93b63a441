"""Through Inductor: right gradients, the memory saved, and a fence that costs nothing."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from remat import remat, save_matmuls, save_nothing
from tests.compile.inside import inductor as _taught
from tests.compiled import compiled
from tests.helpers import rand, same
from tests.inside import trace_memory


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    # Code from before a change of the lowerings would be found under the same graph.
    with config.patch(fx_graph_cache=False):
        yield


def block(up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    return x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ up) @ down


def network(wrap, depth: int = 8):
    # One wrapper for all blocks: their graphs are alike, so Inductor compiles the kernels once.
    region = wrap(block)

    def loss(weights, x: Tensor) -> Tensor:
        for up, down in weights:
            x = region(up, down, x)
        return (x**2).sum()

    return loss


def inputs(width: int = 32, rows: int = 1024, depth: int = 8):
    weights = [
        (rand(width, 4 * width, dtype=torch.float32) / 8, rand(4 * width, width, dtype=torch.float32) / 16)
        for _ in range(depth)
    ]
    return weights, rand(rows, width, dtype=torch.float32)


def leaves(weights):
    return [tuple(w.detach().requires_grad_() for w in pair) for pair in weights]


def by_backward(loss, weights, x):
    pairs = leaves(weights)
    run = compiled(loss, "inductor")
    flat = [w for pair in pairs for w in pair]
    return lambda: torch.autograd.grad(run(pairs, x), flat)


def by_grad(loss, weights, x):
    run = compiled(grad(loss), "inductor")
    return lambda: [g for pair in run(weights, x) for g in pair]


def plain(fn):
    return fn


@pytest.mark.slow
@pytest.mark.parametrize("by", [by_backward, by_grad], ids=lambda by: by.__name__)
def test_memory_is_saved_and_gradients_are_right(by):
    weights, x = inputs()
    peaks, gradients = [], []
    for wrap in (plain, remat):
        torch._dynamo.reset()
        step = by(network(wrap), weights, x)
        gradients.append(step())
        peaks.append(trace_memory(lambda mark, step=step: step()).peak)
    want = grad(network(plain))(weights, x)
    same(list(gradients[1]), [g for pair in want for g in pair], 1e-4)
    assert peaks[1] <= 0.32 * peaks[0]


def gated(gate: Tensor, up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    normed = F.rms_norm(x, x.shape[-1:])
    return x + (F.silu(normed @ gate) * (normed @ up)) @ down


def peak_of_gated(wrap) -> int:
    weights = [
        [rand(*shape, dtype=torch.float32) / 16 for shape in ((64, 256), (64, 256), (256, 64))]
        for _ in range(2)
    ]
    region, leaves = wrap(gated), [[w.requires_grad_() for w in layer] for layer in weights]

    def loss(x: Tensor) -> Tensor:
        for layer in leaves:
            x = region(*layer, x)
        return x.square().sum()

    torch._dynamo.reset()
    run, x = compiled(loss, "inductor"), rand(256, 64, dtype=torch.float32)
    flat = [w for layer in leaves for w in layer]
    step = lambda: torch.autograd.grad(run(x), flat)  # noqa: E731
    step()
    return trace_memory(lambda mark: step()).peak


@pytest.mark.slow
def test_a_backward_holds_no_dead_memory_across_regions():
    # Two blocks: where the first gave its memory on to the second, both blocks' were there at once.
    rival = peak_of_gated(lambda fn: functools.partial(checkpoint, fn, use_reentrant=False))
    assert peak_of_gated(remat) <= rival


@pytest.mark.slow
def test_per_sample_gradients_under_a_policy():
    weights, x = inputs(width=8, rows=4, depth=2)
    per_sample = lambda wrap: vmap(grad(network(wrap)), (None, 0))  # noqa: E731
    got = compiled(per_sample(lambda fn: remat(fn, policy=save_matmuls)), "inductor")(weights, x[:, None])
    same(got, per_sample(plain)(weights, x[:, None]), 1e-4)


@pytest.mark.slow
def test_a_fence_leaves_nothing_in_the_code():
    weights, x = inputs(width=8, rows=16, depth=2)
    run = compiled(grad(network(remat, 2)), "inductor")
    got, [code] = run_and_get_code(run, weights, x)
    same(got, grad(network(plain, 2))(weights, x), 1e-4)
    assert "ops.remat.fence.default(" not in code and "aten.clone" not in code
    # Another name for the block's input: no kernel makes one.
    assert re.search(r"^ *buf\d+ = (arg\d+_1|buf\d+)$", code, re.MULTILINE)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(-1), lambda x: x.t()[1:]])
def test_a_fenced_argument_that_is_returned_is_a_copy(view):
    x, other = rand(2, 3, dtype=torch.float32), rand(2)
    run = compiled(lambda x, other: view(torch.ops.remat.fence.default(x, [other])), "inductor")
    before = x.clone()
    out = run(x, other)
    same(out, view(x), 0.0)
    out.zero_()
    same(x, before, 0.0)


def test_a_fenced_value_is_not_overwritten():
    x, at = rand(64, dtype=torch.float32), torch.tensor([1, 3])

    def write(x, at):
        # Nobody reads the fenced value after this: a buffer of its own could be written in place.
        return torch.index_put(torch.ops.remat.fence.default(x, [at]), (at,), torch.zeros(2))

    before = x.clone()
    same(compiled(write, "inductor")(x, at), write(x, at), 0.0)
    same(x, before, 0.0)


@pytest.mark.slow
def test_a_value_is_read_before_and_after_its_fence():
    region = remat(lambda x: torch.sin(x) * x.flip(0))
    # The recomputation reads exp(x), and so does what comes after it.
    loss = lambda wrap: lambda x: (wrap(torch.exp(x)) * torch.exp(x)).sum()  # noqa: E731
    x = rand(64, dtype=torch.float32) / 4
    want = grad(loss(lambda x: torch.sin(x) * x.flip(0)))(x)
    same(compiled(grad(loss(region)), "inductor")(x), want, 1e-5)


def twice(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(torch.sin(x @ w) * 2) @ w


def backward_code(fn, x: Tensor, w: Tensor):
    """The gradients of `fn` and the code that computes them."""
    leaf = w.clone().requires_grad_()
    run = compiled(fn, "inductor")

    def step():
        first, *_ = torch.autograd.grad(run(x, leaf).square().sum(), leaf)
        # Nothing of one step is left in the memory of the next.
        again, *_ = torch.autograd.grad(run(x, leaf).square().sum(), leaf)
        return first, again

    got, codes = run_and_get_code(step)
    return got, codes[-1]


@pytest.mark.slow
def test_memory_that_only_the_backward_was_given_is_its_own(monkeypatch):
    x, w = rand(64, 8, dtype=torch.float32) / 4, rand(8, 8, dtype=torch.float32) / 4
    told: dict[str, bool] = {}
    hands_over = _taught._hands_over

    def spy(fence, source):
        return told.setdefault(str(fence.args[0]), hands_over(fence, source))

    monkeypatch.setattr(_taught, "_hands_over", spy)
    got, _ = backward_code(remat(twice, policy=save_matmuls), x, w)
    want = grad(lambda w: twice(x, w).square().sum())(w)
    same(list(got), [want, want], 1e-4)
    # The product was made by the forward, the other is an argument of the user's.
    assert told == {"mm": True, "primals_1": False}
    told.clear()
    # In one graph the forward has the product too.
    one = compiled(grad(lambda w: remat(twice, policy=save_matmuls)(x, w).square().sum()), "inductor")
    same(one(w), want, 1e-4)
    assert told and not any(told.values())


@pytest.mark.slow
def test_what_the_backward_reads_beside_the_fence_is_not_written_to():
    x, w = rand(64, 8, dtype=torch.float32) / 4, rand(8, 8, dtype=torch.float32) / 4

    def fn(x, w):
        # The product is read by the region's recomputation, and by the backward of the exponential.
        made = x @ w
        return remat(twice)(made, w) + torch.exp(made).sin()

    want = grad(lambda w: (twice(x @ w, w) + torch.exp(x @ w).sin()).square().sum())(w)
    got, _ = backward_code(fn, x, w)
    same(list(got), [want] * 2, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=repr)
def test_dropout(policy):
    region = remat(lambda x, w: torch.sin(F.dropout(x @ w, 0.5)), policy=policy)
    x, w = torch.eye(16) * 0.4, torch.eye(16) + 0.5
    run = compiled(region, "inductor")
    leaf = x.clone().requires_grad_()
    y = run(leaf, w)
    (gradient,) = torch.autograd.grad(y.sum(), leaf)
    # sin(2 m h) with the mask m: its derivative by h is 2 m cos.
    kept = (y != 0).float()
    assert 0 < kept.mean() < 1
    same(gradient, (2 * kept * (1 - y.detach() ** 2).sqrt()) @ w.T, 1e-3)
