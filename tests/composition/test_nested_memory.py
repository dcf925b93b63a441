"""Regions inside regions under torch.func: results that lie in one memory, and memory that is gone."""

import gc

import pytest
import torch
from torch.func import grad, jacrev, vjp, vmap

from remat import checkpoint_policy, remat, save_matmuls, save_nothing
from tests.helpers import LiveBytes, rand, same


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


TRANSFORMED = {
    "grad": lambda g: grad(lambda a: g(a).sum()),
    "vjp": lambda g: lambda x: vjp(lambda a: g(a) * a, x)[1](x)[0],
    "vmap of grad": lambda g: vmap(grad(lambda a: g(a).sum())),
    "grad of grad": lambda g: grad(lambda a: grad(lambda a: g(a).sum())(a).sin().sum()),
    "two regions": lambda g: grad(lambda a: g(g(a)).sum()),
    "jacrev": lambda g: lambda x: jacrev(lambda s: g(s * x).sum(0))(torch.ones(())),
}


@pytest.mark.parametrize("level", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMED)
def test_a_region_in_a_transform_in_a_region_holds_what_the_outer_one_does(transform, level):
    """Nodes of the inner one hold nothing beside what hooks of the outer one see."""

    def kept(inner):
        region = remat(lambda x: TRANSFORMED[transform](inner)(x.exp()).sin())
        found = []
        for _ in range(3):
            x = torch.linspace(-1, 1, 400 * 100).view(400, 100)
            with LiveBytes() as live:
                # (A pull-back holds the graph, and no result.)
                held = vjp(lambda x: region(x).sum(), x)[1] if level else region(x.requires_grad_()).sum()
            gc.collect()
            found.append(live.bytes // x.nbytes)
            del held
        return found

    def inner(a):
        return (a.sin() * a.cos()).tanh()

    assert kept(remat(inner)) == kept(inner) == [0, 0, 0]


@pytest.mark.parametrize("batched", [False, True])
def test_second_calls_of_nested_derivatives_follow_the_first(batched):
    """A policy is asked where a forward is recorded, and only there."""
    asked = []

    def rule(op):
        asked.append(op)
        return op.op is torch.ops.aten.mm.default

    x, w = rand(3, 4), rand(4, 4)

    def run(fn, w):
        twice = grad(lambda w: grad(lambda w: fn(w).sum())(w).square().sum())
        return vmap(twice)(torch.stack([w, 2 * w])) if batched else twice(w)

    def fn(w):
        return (x @ w).tanh() @ w

    region, counts = remat(fn, policy=checkpoint_policy(rule)), []
    for scale in (1, 1, 3):
        asked.clear()
        same(run(region, scale * w), run(fn, scale * w))
        counts.append(bool(asked))
    assert counts == [True, False, False]
