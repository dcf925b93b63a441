"""Backwards that are recorded (`create_graph=True`) and differentiated; backwards under plain dual levels."""

from __future__ import annotations

import contextlib
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from remat import checkpoint_policy, remat, save_everything, save_matmuls, save_nothing, save_ops
from tests.helpers import OpCounter, allocations, crossed, rand

POLICIES: dict[str, Any] = {
    "save_nothing": save_nothing,
    "save_matmuls": save_matmuls,
    "save_everything": save_everything,
    "budget": checkpoint_policy(budget=0.4),
}


def mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x + F.tanh(F.gelu(x @ w) @ v)


def batched(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Formulas that save values transposed and flattened."""
    h = F.linear(x.view(2, -1, x.shape[-1]), w.t(), w.sum(0))
    return (F.layer_norm(h, h.shape[-1:]).softmax(-1) @ v).flatten(0, 1) * x.exp()


def drawn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.dropout((x @ w).sin(), 0.5) @ v


def in_stages(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    inner = remat(mlp)
    return inner(inner(x, w, v).sin(), w, v)


pytestmark = pytest.mark.filterwarnings("ignore:A budget of")


def written(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = (x @ w) + 1
    h.mul_(2).tanh_()
    return h.square() @ v


def leaves(rows: int = 4, width: int = 6, inner: int = 8) -> list[Tensor]:
    shapes = [(rows, width), (width, inner), (inner, width)]
    return [(rand(*shape, seed=at) / 2).requires_grad_() for at, shape in enumerate(shapes)]


def forces(block: Any, inputs: list[Tensor], layers: int = 3) -> list[Tensor]:
    x, w, v = inputs
    h = x
    for _ in range(layers):
        h = block(h, w, v)
    (g,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
    return [g, *torch.autograd.grad(g.square().sum() + h.sum(), (x, w, v))]


def wrapped(block: Any, policy: str) -> Any:
    return remat(block, policy=POLICIES[policy])


def twice_alike(run: Any, block: Any, policy: str) -> None:
    region = wrapped(block, policy)
    for seed in range(3):
        found, expected = ((torch.manual_seed(seed), run(f))[1] for f in (region, block))
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("around", ["hooks", "backward hooks", "checkpoint", "autocast"])
def test_with_what_stands_around_it(around: str) -> None:
    def run(block: Any) -> list[Tensor]:
        x, w, v = leaves()
        clones = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
        part = block
        if around == "checkpoint":
            part = lambda *args: checkpoint(block, *args, use_reentrant=False)  # noqa: E731
        casts = torch.autocast("cpu", torch.bfloat16) if around == "autocast" else contextlib.nullcontext()
        with clones if around == "hooks" else casts:
            h = part(part(x, w, v), w, v)
            loss = h.square().sum()
        with clones if "hooks" in around else contextlib.nullcontext():
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return list(torch.autograd.grad(g.square().sum(), (x, w, v)))

    twice_alike(run, batched, "save_nothing")


def test_hooks_of_the_users_around_the_backward_get_what_it_saves() -> None:
    def seen(block: Any) -> int:
        x, w, v = leaves()
        loss, count = block(x, w, v).square().sum(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (count.append(1), t)[1], lambda t: t):
            torch.autograd.grad(loss, x, create_graph=True)
        return len(count)

    assert 0 < seen(remat(mlp)) < seen(mlp)


@pytest.mark.parametrize("what", ["cotangent", "argument"])
def test_a_write_between_the_backwards_is_noticed(what: str) -> None:
    def run(block: Any) -> Any:
        x, w, v = leaves()
        h = block(x, w, v)
        cotangent = h.detach().clone().requires_grad_()
        (g,) = torch.autograd.grad(h, x, cotangent, create_graph=True)
        with torch.no_grad():
            (cotangent if what == "cotangent" else w).mul_(2)
        return torch.autograd.grad(g.square().sum(), (x, w, v))

    for block in (mlp, remat(mlp)):
        with pytest.raises(RuntimeError, match="modified by an inplace|written in place"):
            run(block)


def peak(run: Any) -> int:
    for _ in range(2):
        run()
    return max(accumulate(allocations(run)[0]))


def force_field(block: Any) -> int:
    return peak(lambda: forces(block, leaves(512, 16, 64), 6))


def penalty_in_dual_level(block: Any) -> int:
    def run() -> None:
        x, w, v = leaves(512, 16, 64)
        with forward_ad.dual_level():
            h = forward_ad.make_dual(x.detach(), torch.ones_like(x))
            for _ in range(6):
                h = block(h, w, v)
            h.square().sum().backward()

    return peak(run)


def test_a_force_field_takes_less_than_torchs_checkpoint() -> None:
    plain = force_field(mlp)
    through_checkpoint = force_field(lambda *args: checkpoint(mlp, *args, use_reentrant=False))
    assert force_field(remat(mlp)) < min(0.77 * plain, 0.85 * through_checkpoint)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", [force_field, penalty_in_dual_level], ids=lambda way: way.__name__)
def test_no_policy_takes_more_than_no_remat(way: Any, policy: str) -> None:
    """Nor after calls without tangents."""
    if way is penalty_in_dual_level and policy == "save_matmuls":
        pytest.skip("it keeps the products of tangents, too, which autograd does not save (docs/limits.md)")
    region = wrapped(mlp, policy)
    region(*leaves(512, 16, 64)).sum().backward()
    assert way(region) <= 1.02 * way(mlp)


@pytest.mark.parametrize(
    ("block", "policy", "start"),
    crossed([mlp, drawn, in_stages, written], POLICIES, ["primal", "tangent"], every=4),
)
def test_a_backward_under_a_dual_level(block: Any, policy: str, start: str) -> None:
    """Of gradients of a tangent there is no tangent that torch would tell (with hooks it is another one)."""

    def run(block: Any) -> list[Tensor]:
        x, w, v = leaves()
        with forward_ad.dual_level():
            h = forward_ad.make_dual(x, x.detach().cos())
            for _ in range(2):
                h = block(h, w, v)
            end = forward_ad.unpack_dual(h)[start == "tangent"]
            assert end is not None
            pairs = [forward_ad.unpack_dual(g) for g in torch.autograd.grad(end.square().sum(), (x, w, v))]
            told = 1 if start == "tangent" else 2
            return [t for pair in pairs for t in pair[:told] if t is not None]

    twice_alike(run, block, policy)


def test_a_second_call_has_a_region_run_again_no_more_than_twice() -> None:
    """Once for what the recorded backward reads, and once for what the forward's own graph does."""
    region = remat(mlp, policy=save_ops(torch.ops.aten.exp))
    for _ in range(2):
        x, w, v = leaves()
        h = region(region(x, w, v), w, v)
        (g,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
        with OpCounter() as ops:
            torch.autograd.grad(g.square().sum(), (x, w, v))
    assert ops["gelu"] <= 2 * 2
