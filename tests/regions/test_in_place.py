"""Regions that write in place: what a policy saved stays as it was, whatever is written into its memory."""

import pytest
import torch

from remat import RematError, checkpoint_policy, remat
from remat.policies import save_matmuls, save_nothing, save_ops
from tests.helpers import rand, same


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("viewed", [False, True])
def test_a_kept_value_that_the_function_left_elsewhere_is_overwritten(nested, viewed):
    """As autograd says it of what it saves itself: the kept value would be another one."""
    left = []

    def f(x):
        h = x * 2
        left.append(h.view(2, 4) if viewed else h)
        return h.exp().sin() * h

    region = remat(f, policy=save_ops(torch.ops.aten.mul))
    if nested:
        region = remat(lambda x, inner=region: inner(x.sin()).cos())
    for _ in range(2):
        out = region(torch.ones(8, requires_grad=True))
        with torch.no_grad():
            left[-1].mul_(5)
        with pytest.raises(RematError, match="written in place"):
            out.sum().backward()
    x = torch.ones(8, requires_grad=True)
    (got,) = torch.autograd.grad(region(x).sum(), x)
    plain = f if not nested else lambda x: f(x.sin()).cos()
    torch.testing.assert_close(got, torch.autograd.grad(plain(x).sum(), x)[0])


class WritesInItsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        ctx.saved_tensors[0].fill_(0.0)
        return g * 2


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls, save_ops(torch.ops.aten.sin)], ids=repr)
@pytest.mark.parametrize("last", [False, True])
def test_a_backward_that_writes_to_what_another_one_reads(policy, last):
    """As without remat: an error if the other one comes after it."""

    def f(x):
        h = x.sin()
        return (
            h.square() + WritesInItsBackward.apply(h) if last else WritesInItsBackward.apply(h) + h.square()
        )

    region = remat(f, policy=policy)
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        if last:
            with pytest.raises(RematError, match="has written in place"):
                region(x).sum().backward()
        else:
            same(torch.autograd.grad(region(x).sum(), x), torch.autograd.grad(f(x).sum(), x))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("policy", [None, save_matmuls])
def test_an_op_that_resizes_what_it_writes_to(policy, nested):
    """Observers of quantization have no channels before their first call, and scales for one."""

    def gradients(make):
        on, empty = torch.ones(1), torch.tensor([])
        observed = [empty.clone(), empty.clone(), torch.ones(1), torch.zeros(1, dtype=torch.int)]
        w, found = rand(4, 3, dtype=torch.float32).requires_grad_(), []

        def layer(x):
            given = (w, on, on, *observed, 0.01, -128, 127, 0, True, True)
            return (x @ torch.ops.aten.fused_moving_avg_obs_fake_quant(*given).T).sin()

        region = make(lambda x: make(layer)(x) * 2) if nested else make(layer)
        for step in range(3):
            x = rand(2, 3, seed=step, dtype=torch.float32).requires_grad_()
            found += torch.autograd.grad(region(x).sum(), (x, w))
            found += [t.clone() for t in observed]
        return found

    same(gradients(lambda f: remat(f, policy=policy)), gradients(lambda f: f))


def test_a_parameter_that_is_written_to_with_gradients_beside_a_transform_is_torchs_error():
    w = rand(3, 4).requires_grad_()

    def fn(a):
        w.mul_(2)
        return torch.func.grad(lambda t: t.sin().sum())(a) * w

    for call in (fn, remat(fn)):
        with pytest.raises(RuntimeError):
            call(rand(3, 4).requires_grad_())


def test_a_part_is_written_and_all_of_it_read_in_a_look_of_a_budget():
    """Of a tensor without data."""

    def layer(x, part, whole):
        with torch.no_grad():
            part.add_(x.mean() * torch.arange(3.0))
        return x.sin() * whole.clone()

    def found(region, **options):
        x, mean = rand(3, 4).requires_grad_(), rand(4)
        outer = region(lambda x, mean: region(layer)(x, mean[1:], mean) * 1.5, **options)
        return torch.autograd.grad(outer(x, mean).sum(), x), mean

    budget = checkpoint_policy(budget="1MiB", cost="flops")
    same(found(remat, policy=budget), found(lambda fn: fn))
