"""What a Function puts on its context: no saved-tensor hook sees it, and reports tell it."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from remat import checkpoint_policy, explain, remat, saved_residuals
from tests.helpers import rand

N = 8


class OnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.slope = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.slope


class InContainers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.parts = {"slopes": [x.cos(), x.cos() * 2], "n": 2}
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        one, two = ctx.parts["slopes"]
        return grad * (two - one)


def in_a_hook(x):
    """Not a Function: the hook's closure holds it as long as the graph lives."""
    slope, y = x.exp().detach(), x.sin()
    y.register_hook(lambda g: g * slope)
    return y


PROGRAMS = {
    "attribute": (lambda x: OnContext.apply(x).sum(), 1),
    "containers": (lambda x: InContainers.apply(x).sum(), 2),
    "hook": (lambda x: in_a_hook(x).sum(), 1),
}


@pytest.mark.parametrize("way", ["plain", "save_nothing", "budget"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_lives_as_long_as_the_graph_is_told(name, way):
    fn, count = PROGRAMS[name]
    x = rand(N, N).requires_grad_()
    policy = checkpoint_policy(budget=1.0) if way == "budget" else None
    found = saved_residuals(fn if way == "plain" else remat(fn, policy=policy), x)
    # A plan that keeps the op has the same memory under its own name.
    hidden = [r for r in found if r.why in ("context", "policy")]
    assert [r.bytes for r in hidden] == [8 * N * N] * count
    assert way == "budget" or "on a Function's context" in str(hidden[0])


@pytest.mark.parametrize("name", PROGRAMS)
def test_regions_with_a_budget_are_right(name):
    fn, _ = PROGRAMS[name]
    x = rand(N, N).requires_grad_()
    region = remat(fn, policy=checkpoint_policy(budget=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            (grad,) = torch.autograd.grad(region(x), x)
            torch.testing.assert_close(grad, torch.autograd.grad(fn(x), x)[0])


def test_what_outlives_the_graph_is_not_counted():
    kept = []

    def fn(x):
        kept.append(x.detach().exp())
        return x.sin().sum()

    assert [r.why for r in saved_residuals(fn, rand(N, N).requires_grad_())] == ["argument"]


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch before 2.13")
def test_chunked_cross_entropy():
    target = torch.randint(0, 64, (32,))
    x, w = torch.randn(32, 8, requires_grad=True), torch.randn(64, 8, requires_grad=True)
    gradients = 4 * (32 * 8 + 64 * 8)

    def loss(x, w):
        return F.linear_cross_entropy(x, w, target, options=nn.LinearCrossEntropyOptions(batch_chunk_size=8))

    region = remat(loss)
    assert saved_residuals(loss, x, w).kept_bytes == saved_residuals(region, x, w).kept_bytes == gradients
    assert explain(region, x, w).kept_bytes == gradients
    assert "3.0 KiB" in str(explain(loss, x, w, policies=True)).splitlines()[4]
