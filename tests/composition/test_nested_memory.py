"""Regions inside regions under torch.func: results that lie in one memory, and memory that is gone."""

import pytest
import torch
from torch.func import grad, jvp

from remat import remat, save_everything, save_matmuls, save_nothing, save_ops
from tests.helpers import rand, same


@pytest.mark.slow
def test_an_index_made_inside_is_not_taken_for_memory_that_is_gone():
    """A snapshot of memory that has gone is not looked up by its address, which a new tensor may have."""

    def write(b):
        v = b.sin()
        rows, columns = torch.tensor([0, 0]), torch.tensor([1, 2])
        return v.index_put_((rows, columns), b[0, :2], accumulate=True)

    def derivative(wrap):
        x = rand(2, 4).requires_grad_()
        inner = wrap(wrap(write, save_nothing), save_everything)
        force = wrap(lambda x: grad(lambda a: inner(a).sin().sum())(x), save_nothing)
        return torch.autograd.grad(force(x).sum(), x)[0]

    expected = derivative(lambda fn, _: fn)
    for _ in range(6):
        same(derivative(lambda fn, policy: remat(fn, policy=policy)), expected)


@pytest.mark.parametrize("inner", [save_everything, save_ops(torch.ops.aten.mul)], ids=["all", "ops"])
def test_what_a_region_inside_keeps_and_writes_to_is_the_copy_in_later_calls_too(inner):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y.sin()

        @staticmethod
        def backward(ctx, *cotangents):
            x, y = ctx.saved_tensors
            return cotangents[0] * y.sin(), cotangents[0] * x * y.cos()

    y, found = rand(3, 4), []
    for wrap in (lambda fn, policy: remat(fn, policy=policy), lambda fn, policy: fn):
        w = rand(4, 4).requires_grad_()

        def write(b):
            v = b.cos() * 2
            v.view(-1)[::2].mul_(2)
            return Product.apply(v, y)

        region = wrap(write, inner)
        twice = wrap(lambda a, r=region, w=w: torch.tanh(r(torch.tanh(r(a) @ w)) @ w), save_nothing)
        found.append([torch.autograd.grad(twice(y).sin().sum(), w)[0] for _ in range(4)])
    same(found[0], found[1])


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=["nothing", "matmuls"])
def test_a_transform_inside_a_region_runs_python_once_in_a_first_call(policy):
    norm, calls = torch.nn.BatchNorm1d(4).double(), []

    def energy(x):
        calls.append(1)
        h = torch.nn.functional.dropout(norm(x), 0.5)
        return h * grad(lambda x: x.sin().sum())(x)

    x = rand(3, 4).requires_grad_()
    torch.manual_seed(0)
    out = remat(energy, policy=policy)(x)
    drawn = torch.rand(1)
    assert len(calls) == 1 and int(norm.num_batches_tracked) == 1  # pyright: ignore[reportArgumentType]
    got = torch.autograd.grad(out.sum(), x)
    norm.reset_running_stats()
    torch.manual_seed(0)
    out = energy(x)
    same(drawn, torch.rand(1), 0.0)
    same(got, torch.autograd.grad(out.sum(), x))


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=["nothing", "matmuls"])
@pytest.mark.parametrize("transform", [jvp, lambda fn, x, t: (0, grad(lambda x: fn(x).sum())(*x))])
def test_buffers_are_written_once_where_ops_cannot_be_compared(transform, policy):
    """A forward derivative inside leaves out what is zero, by rules that differ between the passes."""
    found = []
    for wrap in (lambda fn: remat(fn, policy=policy), lambda fn: fn):
        norm, queue = torch.nn.BatchNorm1d(4).double(), rand(4, 4)

        def force(x, norm=norm, queue=queue):
            with torch.no_grad():
                queue.copy_(torch.cat([x.detach()[:1], queue[:-1]]))
            h = norm(x) * queue[1].sin()
            return transform(lambda t: t.sin() * x, (h,), (x,))[1]

        region, seen = wrap(force), []
        for _ in range(3):
            x = rand(3, 4).requires_grad_()
            seen += [torch.autograd.grad(region(x).sum(), x)[0], queue.clone(), norm.running_mean.clone()]  # pyright: ignore[reportOptionalMemberAccess]
            seen.append(norm.num_batches_tracked.clone())  # pyright: ignore[reportOptionalMemberAccess]
        found.append(seen)
    same(found[0], found[1])
