"""Backwards in parts: inputs first, weights later in one pass each, as ZeroBubble's pipelines have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from remat import RematError, remat, save_matmuls, save_nothing, save_ops
from tests.helpers import crossed, rand
from tests.inside import trace_memory
from tests.regions.inside import Work

POLICIES = {"save_nothing": save_nothing, "save_matmuls": save_matmuls}
# (What weights read lies in memory that is kept.)
KEPT = {**POLICIES, "gelu": save_ops(torch.ops.aten.gelu)}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stage:
    """Two blocks of a pipeline; `wrap` makes regions of them."""

    def __init__(self, wrap: Any, width: int = 8) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.wrap, self.x, self.waiting = wrap, rand(16, width, dtype=torch.float32), {}

    def forward(self, at: int) -> None:
        x = h = (self.x + at).requires_grad_()
        for block in self.blocks:
            h = self.wrap(block)(h)
        self.waiting[at] = x, h

    def inputs(self, at: int) -> None:
        x, out = self.waiting.pop(at)
        self.waiting[at] = stage_backward_input([out], [out.cos().detach()], [x], self.blocks.parameters())[1]

    def weights(self, at: int) -> None:
        stage_backward_weight(self.blocks.parameters(), self.waiting.pop(at))

    def step(self) -> list[Tensor]:
        self.blocks.zero_grad()
        for order in ("f0", "f1", "i0", "f2", "i1", "w0", "i2", "w1", "w2"):
            {"f": self.forward, "i": self.inputs, "w": self.weights}[order[0]](int(order[1]))
        return [p.grad.clone() for p in self.blocks.parameters() if p.grad is not None]


@pytest.mark.parametrize("policy", KEPT)
def test_a_region_is_recomputed_once_for_inputs_and_weights(policy: str) -> None:
    """Twice the first time: then it is known what gradients of weights read."""
    plain, ours = Stage(lambda block: block), Stage(lambda block: remat(block, policy=KEPT[policy]))
    with Work() as least:
        expected = plain.step()
    seen = []
    for _ in range(3):
        with Work() as work:
            torch.testing.assert_close(ours.step(), expected, rtol=0, atol=0)
        seen.append(work.ops - least.ops)
    assert seen[0]["native_layer_norm"] > 6
    for again in seen[1:]:
        # Three microbatches of two blocks.
        assert again["native_layer_norm"] == 6
        assert again["addmm"] == {"save_nothing": 6, "save_matmuls": 0, "gelu": 6}[policy]
        assert again["gelu"] == (0 if policy == "gelu" else 6)


def test_a_region_in_a_region_is_recomputed_in_each_part() -> None:
    plain, ours = Stage(lambda block: block), Stage(lambda block: remat(lambda x: remat(block)(x)))
    with Work() as least:
        expected = plain.step()
    for _ in range(3):
        with Work() as work:
            torch.testing.assert_close(ours.step(), expected, rtol=0, atol=0)
        assert (work.ops - least.ops)["native_layer_norm"] > 6


@pytest.mark.slow
def test_it_peaks_below_torchs_checkpoint_and_no_remat() -> None:
    def through_checkpoint(block: nn.Module) -> Any:
        return lambda x: checkpoint(block, x, use_reentrant=False)

    peaks = []
    for wrap in (remat, through_checkpoint, lambda block: block):
        stage = Stage(wrap, 32)
        stage.step()
        traces = [trace_memory(lambda _, stage=stage: stage.step()) for _ in range(2)]
        gradients = sum(p.nbytes for p in stage.blocks.parameters())  # which all of them make
        peaks.append(min(trace.peak for trace in traces) - gradients)
    assert peaks[0] < 0.8 * min(peaks[1:])


def weights_one_by_one(wrap: Any, between: Any) -> list[Tensor]:
    x, w, v = (
        rand(4, 4).requires_grad_(),
        rand(4, 4, seed=1).requires_grad_(),
        rand(4, 4, seed=2).requires_grad_(),
    )
    out = wrap(lambda x, w, v: F.linear(x.tanh(), w) + F.linear(x.sin(), v))(x, w, v)
    found = list(torch.autograd.grad(out.sum(), x, retain_graph=True))
    for leaf in (w, v):
        between(x, w, v, out)
        found += torch.autograd.grad(out.sum(), leaf, retain_graph=leaf is w)
    return found


@pytest.mark.parametrize(
    ("policy", "what"), crossed(POLICIES, ["nothing", "a forward", "a gradient of something else"], every=2)
)
def test_what_happens_between_the_parts(policy: str, what: str) -> None:
    def between(x: Tensor, w: Tensor, *_: Tensor) -> None:
        if what != "nothing":
            other = remat(lambda x: (x @ w).tanh().exp())(x)
            if what != "a forward":
                torch.autograd.grad(other.sum(), w)

    expected = weights_one_by_one(lambda f: f, between)
    found = weights_one_by_one(lambda f: remat(f, policy=POLICIES[policy]), between)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_write_between_the_parts_is_noticed(policy: str, nested: bool) -> None:
    """To a weight that is read again through a view of it, which has outlived the pass before."""
    calls = 0

    def between(x: Tensor, w: Tensor, v: Tensor, out: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            with torch.no_grad():
                v.mul_(2)

    def wrap(fn: Any) -> Any:
        inner = remat(fn, policy=POLICIES[policy])
        return remat(lambda *args: inner(*args)) if nested else inner

    weights_one_by_one(wrap, lambda *_: None)
    with pytest.raises(RuntimeError, match="written in place|modified by an inplace"):
        weights_one_by_one(wrap, between)


def test_a_write_to_what_is_kept_is_noticed_in_a_later_part() -> None:
    """The region returns it, and a later part reads it again."""
    region = remat(lambda x, w: (h := x.exp(), (h @ w).sin()), policy=save_ops(torch.ops.aten.exp))

    def step(writes: bool) -> None:
        x, w = rand(4, 4).requires_grad_(), rand(4, 4, seed=1).requires_grad_()
        kept, out = region(x, w)
        torch.autograd.grad(out.sum(), x, retain_graph=True)
        if writes:
            kept.detach().mul_(2)
        torch.autograd.grad(out.sum(), w)

    for _ in range(2):
        step(False)
    with pytest.raises(RematError, match="written in place"):
        step(True)


class Scales(torch.autograd.Function):
    """Its backward writes over what it has saved, which a value of its own would not mind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        grads = g * w, g * x
        x.zero_()
        return grads


def test_a_backward_that_writes_to_what_it_saved_spoils_no_later_part() -> None:
    def found(wrap: Any) -> list[Tensor]:
        x, w, v = (rand(3, seed=i).requires_grad_() for i in range(3))
        h = wrap(lambda x, w, v: (lambda h: Scales.apply(h, w) * 2 + h * v)(x.exp()))(x, w, v)
        return [torch.autograd.grad(h.sum(), leaf, retain_graph=True)[0] for leaf in (w, v)]

    for _ in range(3):
        torch.testing.assert_close(found(remat), [rand(3).exp() * 2, rand(3).exp()])


def test_nothing_that_a_pass_has_made_outlives_it() -> None:
    x, w = rand(1000).requires_grad_(), rand(1000, seed=1).requires_grad_()
    region = remat(lambda x, w: (x.exp() * w).sin())

    def kept(passes: int) -> int:
        def step(mark: Any) -> Any:
            outs = [region(x, w) for _ in range(3)]
            # Each pass leaves the exponential, which the gradient of `w` would read.
            for out in outs * passes:
                torch.autograd.grad(out.sum(), x, retain_graph=True)
            mark()
            return outs

        return trace_memory(step).kept

    kept(1)
    assert kept(2) == kept(1) == kept(0)


def test_passes_that_read_the_same_leave_nothing_to_each_other() -> None:
    """Rows of a Jacobian: a pass each, all through the same nodes."""
    x, w = rand(1000).requires_grad_(), rand(1000, seed=1).requires_grad_()
    regions = [remat(lambda x, w: (x.exp() * w).sin(), name=f"{i}") for i in range(2)]

    def step(mark: Any) -> Any:
        out = regions[1](regions[0](x, w), w)
        for at in range(3):
            torch.autograd.grad(out[at], x, retain_graph=True)
        mark()
        return out

    kept = [trace_memory(step).kept for _ in range(3)]
    assert max(kept) <= kept[0] and kept[0] < 6 * 8000
