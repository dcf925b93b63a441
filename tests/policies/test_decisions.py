"""Decisions: what is discrete and was made of computed floats is the same in both passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from benchmarks.common.models import SIZES
from remat import (
    checkpoint_name,
    checkpoint_policy,
    offload,
    remat,
    save_all_but_names,
    save_matmuls,
    save_nothing,
    saved_residuals,
)
from remat.nn import apply_to
from tests.compiled import compiled
from tests.helpers import crossed, forget, rand

TOKENS, WIDTH, EXPERTS = 64, 6, 8
RUNS = [0]
# A thousandth of noise, and what it comes to where nothing flips: less than that.
LIMIT = 1e-3


@torch.library.custom_op("remat_tests::jitter", mutates_args=())
def jitter(h: torch.Tensor) -> torch.Tensor:
    """Nothing in the first run, a thousandth in every later one: what another kernel might make of it."""
    RUNS[0] += 1
    if RUNS[0] == 1:
        return torch.zeros_like(h)
    generator = torch.Generator().manual_seed(RUNS[0])
    return 2e-3 * torch.rand(h.shape, dtype=h.dtype, generator=generator) - 1e-3


jitter.register_fake(torch.empty_like)
jitter.register_vmap(lambda info, dims, h: (jitter(h), dims[0]))


def logits(x, router):
    h = x @ router
    return h + jitter(h.detach())


def dense(x, router, w):
    weight, chosen = logits(x, router).softmax(-1).topk(2, -1)
    return torch.einsum("tk,td,tkde->te", weight, x, w[chosen]).tanh()


def ragged(x, router, w):
    weight, chosen = logits(x, router).softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for expert in range(len(w)):
        token, place = torch.where(chosen == expert)
        made = x[token] @ w[expert]
        made = made.relu() + torch.ones_like(made)
        out = out.index_add(0, token, made * weight[token, place, None])
    return out


def capacity(x, router, w):
    weight, chosen = logits(x, router).softmax(-1).max(-1)
    mine = (chosen[:, None] == torch.arange(len(w))).long()
    fits = (mine.cumsum(0) * mine <= 3) & (mine > 0)
    return torch.einsum("te,td,edf->tf", fits.to(x.dtype), x, w).tanh() * weight[:, None]


def straight_through(x, router, w):
    soft = logits(x, router).softmax(-1)
    hard = (soft == soft.max(-1, keepdim=True).values).to(soft.dtype)
    return torch.einsum("te,td,edf->tf", hard + soft - soft.detach(), x, w).tanh()


def threshold(x, router, w):
    soft = logits(x, router).sigmoid()
    # The mean: of the sum of so many experts tanh is flat, and tells little but noise.
    return (torch.einsum("te,td,edf->tf", torch.where(soft > 0.5, soft, 0.0), x, w) / len(w)).tanh()


def bucketed(x, router, w):
    score = logits(x, router)[:, 0]
    bounds = torch.linspace(-0.008, 0.008, len(w) - 1, dtype=score.dtype)
    bucket = torch.bucketize(score.detach().contiguous(), bounds)
    return torch.einsum("td,tde->te", x, w[bucket]) * score.sigmoid()[:, None]


BATCHED = [dense, capacity, straight_through, threshold, bucketed]
ALL = [*BATCHED, ragged]


def given(many=False):
    torch.manual_seed(1)
    x = rand(3, TOKENS, WIDTH) if many else rand(TOKENS, WIDTH)
    return x, rand(WIDTH, EXPERTS) * 0.002, rand(EXPERTS, WIDTH, WIDTH)


def loss(fn):
    return lambda *args: (fn(*args) ** 2).sum()


def backward(fn):
    args = [t.requires_grad_() for t in given()]
    return torch.autograd.grad(loss(fn)(*args), args)


def by_func(fn):
    return grad(loss(fn), (0, 1, 2))(*given())


def by_vmap(fn):
    return vmap(grad(loss(fn), (0, 1, 2)), (0, None, None))(*given(many=True))


def by_compile(fn):
    torch._dynamo.reset()
    args = [t.requires_grad_() for t in given()]
    return torch.autograd.grad(compiled(loss(fn))(*args), args)


def by_compiled_grad(fn):
    torch._dynamo.reset()
    return compiled(grad(loss(fn), (0, 1, 2)))(*given())


def distance(got, want):
    """How far gradients are off, by the norm of all. (One entry has up to twice the noise of its logits.)"""
    got, want = (torch.cat([t.flatten() for t in gradients]) for gradients in (got, want))
    return float((got - want).norm() / want.norm())


def off(run, fn, **options):
    """How far the gradients of two calls with remat are from those without."""
    forget()
    found = []
    region = remat(fn, **options)
    for one in (fn, region, region):
        RUNS[0] = 0
        torch.manual_seed(0)
        found.append(run(one))
    return max(distance(got, found[0]) for got in found[1:])


@pytest.mark.parametrize(
    ("fn", "policy"), crossed(ALL, [save_nothing, save_matmuls, offload(save_matmuls)], every=2)
)
def test_decisions_do_not_flip_in_plain_autograd(fn, policy):
    assert off(backward, fn, policy=policy) < LIMIT


@pytest.mark.parametrize(("fn", "run"), crossed(BATCHED, [by_func, by_vmap], every=2))
def test_decisions_do_not_flip_under_func(fn, run):
    assert off(run, fn) < LIMIT
    assert off(run, fn, policy=save_matmuls) < LIMIT


def test_decisions_do_not_flip_under_func_where_sizes_depend_on_them():
    assert off(by_func, ragged) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("fn", [capacity, bucketed], ids=lambda fn: fn.__name__)
def test_decisions_do_not_flip_in_compiled_code(fn):
    """Those of a detached value, too, which the compiler's trace takes for another one."""
    assert off(by_compile, fn) < LIMIT


# Every function, policy and way; of their combinations every fourth one.
KEEPING = [save_nothing, save_matmuls, checkpoint_policy(budget=0.4)]
SOME = crossed(BATCHED, KEEPING, [by_compile, by_compiled_grad], every=4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The cost of remat_tests")
@pytest.mark.parametrize(("fn", "policy", "run"), SOME)
def test_every_decision_in_compiled_code(fn, policy, run):
    assert off(run, fn, policy=policy) < LIMIT


@pytest.mark.slow
def test_a_region_made_in_compiled_code_has_the_option():
    def flips(keep):
        return lambda x, r, w: remat(dense, keep_decisions=keep)(x, r, w)

    RUNS[0] = 0
    want = backward(dense)
    for keep in (True, False):
        RUNS[0] = 0
        got = by_compile(flips(keep))
        assert (distance(got, want) < LIMIT) is keep


@pytest.mark.parametrize("run", [backward, by_func])
def test_without_the_option_they_flip(run):
    assert off(run, dense, keep_decisions=False) > 0.01


@pytest.mark.filterwarnings("ignore:The cost of remat_tests")
def test_budgets_keep_decisions():
    assert off(backward, dense, policy=checkpoint_policy(budget=0.3)) < LIMIT


def test_a_name_bars_a_decision():
    def named(x, router, w):
        weight, chosen = logits(x, router).softmax(-1).topk(2, -1)
        return torch.einsum("tk,td,tkde->te", weight, x, w[checkpoint_name(chosen, "chosen")]).tanh()

    assert off(backward, named) < LIMIT
    assert why(named, policy=save_all_but_names("chosen")).count("decision") == 0


def why(fn, *args, **options):
    args = args or [t.requires_grad_() for t in given()]
    return [r.why for r in saved_residuals(remat(fn, **options), *args)]


def test_reports_say_what_is_kept_for_that():
    RUNS[0] = 1
    assert why(dense).count("decision") == 2  # weights and indices of topk
    assert why(dense, keep_decisions=False).count("decision") == 0


@pytest.mark.parametrize(
    "decide",
    [
        lambda p: p.topk(2).indices[:, :1],
        lambda p: p.sort(-1).indices,
        lambda p: p.argsort(-1),
        lambda p: p.argmin(-1, keepdim=True),
        lambda p: p.median(-1, keepdim=True).indices,
        lambda p: p.mode(-1, keepdim=True).indices,
        lambda p: p.kthvalue(2, -1, keepdim=True).indices,
        lambda p: p.cummax(-1).indices,
        lambda p: torch.multinomial(p, 1),
        lambda p: torch.bernoulli(p).long(),
        lambda p: torch.poisson(p).clamp(max=7).long(),
        lambda p: torch.searchsorted(p.cumsum(-1), p[:, :1].contiguous()).clamp(max=7),
        lambda p: (p > 0.2).nonzero()[:8, 1:].clone().expand(8, 1),
        lambda p: (p * 8).round().unique().long()[:1].expand(8, 1),
        lambda p: p.mul(7).floor().int().long(),
        lambda p: (p * 7).to(torch.int64),
        lambda p: p.isclose(p.amax(-1, keepdim=True)).long(),
        lambda p: torch.histc(p, 4).long()[:1].expand(8, 1) % 8,
    ],
)
def test_every_kind_of_decision_is_kept(decide):
    def fn(x):
        p = x.sin().exp().softmax(-1)
        return (x.exp().gather(-1, decide(p.detach()))).sin()

    assert "decision" in why(fn, rand(8, 8).requires_grad_())


def nothing_to_keep():
    """Functions whose integers and bools are the same in every run, or are read by nobody."""
    x = rand(8, 8).requires_grad_()
    yield lambda x: torch.where(x > 0, x.sin(), x.exp()), x  # of an argument
    yield lambda x: x.sin().masked_fill(torch.ones(8, 8).tril() == 0, 0.0).exp(), x  # of constants
    yield lambda x: (x.sin() * (torch.rand(8, 8) > 0.1)).exp(), x  # of a draw, which is drawn again
    yield lambda x: x.sin()[torch.arange(8).flip(0)].exp(), x
    yield lambda x: F.dropout(x.sin(), 0.5).exp(), x
    yield lambda x: F.max_pool1d(x.sin(), 2).exp().sin(), x
    yield lambda x: (x.sin().relu() + x.cos()).exp(), x
    yield lambda x: (x.sin().argmax(), x.sin().exp())[1], x  # read by nobody


def test_what_cannot_flip_is_not_kept():
    for fn, x in nothing_to_keep():
        assert "decision" not in why(fn, x)


def test_a_mask_is_kept_by_its_own_size():
    x = rand(64, 64).requires_grad_()
    fn = lambda x: torch.where(x.sin() > 0, x.cos(), x.exp()).sin()  # noqa: E731
    kept = [r.bytes for r in saved_residuals(remat(fn), x) if r.why == "decision"]
    assert kept == [64 * 64]


def test_decisions_of_experts_at_their_published_width_cost_a_hundredth():
    """The mixture of experts of the benchmarks, at the width of its GPU size, beside the block's input."""
    kind, size, _ = SIZES["moe"]
    model: Any = kind(name="moe", **(size | {"depth": 1}))
    with torch.device("meta"):
        x = torch.empty(2, 256, size["width"], dtype=torch.bfloat16, requires_grad=True)
        shapes = {name: shape for name, (shape, _) in model.shapes().items()}
        params = {name: torch.empty(s, dtype=x.dtype, requires_grad=True) for name, s in shapes.items()}
    residuals = saved_residuals(remat(lambda p, x: model.block(p, x, lambda name, fn: fn)), params, x)
    kept = sum(r.bytes for r in residuals if r.why == "decision")
    assert kept == residuals.kept_bytes == 20 * 2 * 256
    assert kept <= 0.01 * x.nbytes


def test_indices_of_indices_are_made_again():
    def fn(x):
        hot = F.one_hot(x.sin().argmax(-1), 8)
        return (x.exp() * hot.cumsum(0)).sin()

    residuals = saved_residuals(remat(fn), rand(64, 8).requires_grad_())
    assert [r.shape for r in residuals if r.why == "decision"] == [(64,)]


def test_layers_of_a_model_take_the_option():
    class Routed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            _, self.router, self.w = [torch.nn.Parameter(t) for t in given()]

        def forward(self, x):
            return dense(x, self.router, self.w)

    x = given()[0].requires_grad_()
    for keep in (True, False):
        layer = apply_to(Routed(), keep_decisions=keep)
        whys = [r.why for r in saved_residuals(layer, x)]
        assert ("decision" in whys) is keep


def test_a_branch_on_computed_numbers_is_taken_again():
    def fn(x):
        h = x.sin()
        h = h + jitter(h.detach())
        return (h.exp() if h.sum().item() > h.detach().sum().item() - 1e-9 else h.cos()).sin()

    RUNS[0] = 0
    want = grad(lambda x: fn(x).sum())(rand(5))
    for _ in range(2):
        RUNS[0] = 0
        got = grad(lambda x: remat(fn)(x).sum())(rand(5))
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_sizes_that_depend_on_data_may_change_from_call_to_call():
    def fn(x, chosen):
        y = x[chosen]
        return ((y + torch.ones_like(y)) * x.sum(0)).sin()

    region = remat(fn)
    for count in (5, 3, 1, 7):
        x, chosen = rand(8, 3).requires_grad_(), torch.arange(8) < count
        want, got = (torch.autograd.grad(f(x, chosen).sum(), x)[0] for f in (fn, region))
        assert torch.equal(got, want)


def test_a_forward_that_leaves_its_tape_keeps_decisions():
    turn = [0]

    def fn(x, router, w):
        weight, chosen = logits(x, router).softmax(-1).topk(2, -1)
        if turn[0] % 4 < 2:
            return weight.cos().exp()
        return torch.einsum("tk,td,tkde->te", weight, x, w[chosen]).tanh()

    forget()
    region = remat(fn)
    for turn[0] in range(6):  # noqa: B020
        found = []
        for one in (fn, region):
            RUNS[0] = 0
            args = [t.requires_grad_() for t in given()]
            found.append(torch.autograd.grad(loss(one)(*args), args, materialize_grads=True))
        assert distance(found[1], found[0]) < LIMIT


def recurrent():
    x = rand(5, 4, 8).float().requires_grad_()
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        for options in ({"num_layers": 2}, {"bidirectional": True, "num_layers": 2}):
            yield kind(8, 6, **options), x
    yield torch.nn.LSTM(256, 2, num_layers=2), rand(5, 4, 256).float().requires_grad_()  # less than it reads


@pytest.mark.parametrize("at", range(7))
def test_the_workspace_of_a_kernel_is_no_decision(at):
    model, x = list(recurrent())[at]
    fn = lambda x: model(x.sin())[0].sin()  # noqa: E731
    found = saved_residuals(remat(fn), x)
    assert [r.bytes for r in found if r.why == "decision"] == []  # oneDNN's LSTM: 3.8 MB for 77 KB
    want = torch.autograd.grad(fn(x).sum(), x)
    assert all(map(torch.equal, torch.autograd.grad(remat(fn)(x).sum(), x), want))


@torch.library.custom_op("rematworkspace::coded", mutates_args=())
def coded(x: torch.Tensor, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (x > 0).to(torch.uint8).flatten().repeat(extra), x.mean()


coded.register_fake(lambda x, extra: (x.new_empty(x.numel() * extra, dtype=torch.uint8), x.mean()))


def test_codes_of_what_an_op_reads_are_decisions():
    def fn(x, extra):
        code, scale = coded(x.sin(), extra)
        return (x.exp() * code[: x.numel()].view_as(x)).sin() * scale

    x = rand(8, 8).requires_grad_()
    kept = [sum(r.bytes for r in saved_residuals(remat(fn), x, n) if r.why == "decision") for n in (1, 3)]
    assert kept == [8 * 8 + 8, 0]
