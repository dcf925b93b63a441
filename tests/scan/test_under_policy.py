"""A scan inside a region whose policy keeps values: what the policy says holds for the ops of the steps."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, hessian, vmap

from remat import remat, save_everything, save_matmuls, save_nothing, save_ops, scan_remat
from tests.helpers import LiveBytes, OpCounter, same

N, D = 5, 4
W = torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 2
X = torch.linspace(-1, 1, 3 * D, dtype=torch.float64).view(3, D)


def step(x, w):
    return torch.sin(torch.sin(x @ w) @ w), None


def scanned(x, w, checkpoints: str | int = "all", **options):
    return scan_remat(lambda x, _: step(x, w), x, length=N, checkpoints=checkpoints, **options)[0]


def looped(x, w):
    for _ in range(N):
        x, _ = step(x, w)
    return x


def in_backward(fn):
    """The ops of a backward by autograd, and the gradient."""
    w = W.clone().requires_grad_()
    out = fn(X, w)
    with OpCounter() as ops:
        out.sum().backward()
    return ops, w.grad


def test_the_verdicts_are_those_of_a_loop_in_every_call():
    expected, gradient = in_backward(remat(looped, policy=save_matmuls))
    region = remat(scanned, policy=save_matmuls)
    for _ in range(3):  # what a first call teaches, later ones use
        ops, found = in_backward(region)
        assert (ops.dots, ops["sin"], ops["cos"]) == (expected.dots, expected["sin"], expected["cos"])
        torch.testing.assert_close(found, gradient)
    assert ops.dots == 4 * N - 1


def test_under_torch_func():
    def dots(fn):
        with OpCounter() as ops:
            grad(lambda w: fn(X, w).sum())(W)
        return ops.dots

    region = remat(scanned, policy=save_matmuls)
    assert dots(region) == dots(looped) < dots(remat(scanned, policy=save_nothing))
    for transform in (grad, hessian):
        torch.testing.assert_close(
            transform(lambda w: region(X, w).sum())(W), transform(lambda w: looped(X, w).sum())(W)
        )
    batch = torch.stack([W, 2 * W])
    torch.testing.assert_close(
        vmap(grad(lambda w: region(X, w).sum()))(batch), vmap(grad(lambda w: looped(X, w).sum()))(batch)
    )


def test_a_policy_of_its_own_and_one_around_keep_what_either_keeps():
    """A region that keeps nothing inside: its own policy, which keeps nothing, is the nearest."""
    inner = remat(scanned, policy=save_nothing)
    ops, _ = in_backward(remat(lambda x, w: inner(x, w), policy=save_matmuls))
    assert ops.dots > 4 * N
    both = remat(lambda x, w: scanned(x, w, policy=save_matmuls), policy=save_everything)
    ops, found = in_backward(both)
    assert ops.dots == 4 * N - 1
    torch.testing.assert_close(found, in_backward(looped)[1])


@pytest.mark.parametrize("checkpoints", ["sqrt", 2])
def test_a_number_of_carries_is_kept_to(checkpoints):
    """Steps that are reversed at once leave nothing to decide: the schedule stays what was asked for."""
    seen = []

    def body(x, w):
        options = {"on_step": lambda *event: seen.append(event)}
        return scanned(x, w, checkpoints=checkpoints, **options)

    _, found = in_backward(remat(body, policy=save_matmuls))
    assert [k for phase, k in seen if phase == "reverse"] == list(range(N))[::-1]
    torch.testing.assert_close(found, in_backward(looped)[1])


def test_what_is_kept_between_is_what_the_policy_says():
    def kept(policy):
        w = W.clone().requires_grad_()
        with LiveBytes() as live:
            out = remat(scanned, policy=policy)(X, w)
            return (live.bytes - out.nbytes) // X.nbytes

    # Two products a step, of which the last one's sine is the result.
    assert kept(save_matmuls) == 2 * N
    assert kept(save_nothing) == 0


def test_regions_of_the_same_code_around_other_schedules():
    """The ops of the forward are the same, the carries that are kept are not."""
    expected = in_backward(looped)[1]
    for checkpoints in ("sqrt", 2, 3, "sqrt", 1):
        region = remat(lambda x, w, c=checkpoints: scanned(x, w, c), policy=save_matmuls)
        torch.testing.assert_close(in_backward(region)[1], expected)


@pytest.mark.parametrize("checkpoints", [1, 2, "all"])
def test_steps_draw_again_what_the_region_around_keeps(checkpoints):
    """A kept draw is handed out, and the scan notes where the generators are after it, as after any."""
    step = lambda h: h * X.sin()[:, torch.randperm(D)]  # noqa: E731
    scan = lambda x: scan_remat(lambda h, _: (step(h), None), x, length=3, checkpoints=checkpoints)[0]  # noqa: E731

    def run(fn):
        torch.manual_seed(0)
        return grad(lambda x: fn(x).sum())(X), torch.rand(1)

    same(run(remat(scan, policy=save_ops(torch.ops.aten.randperm))), run(lambda x: step(step(step(x)))))
