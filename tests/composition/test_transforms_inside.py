"""Transforms of `torch.func` inside regions, scans and loops: of arguments, and of constants from outside."""

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

from remat import remat, save_nothing, save_ops
from tests.helpers import LiveBytes, OpCounter, rand, same

X = rand(3)
CONSTANT = rand(3)
LEARNT = rand(3).requires_grad_()


NESTS = {
    "grad": grad,
    "grad of grad": lambda f: grad(lambda a: grad(f)(a).sin().sum()),
    "jacrev": lambda f: lambda x: jacrev(lambda a: f(a) * a)(x).sum(0),
    "vmap of grad": lambda f: lambda x: vmap(grad(f))(torch.stack([x, 2 * x])).sum(0),
    "vjp": lambda f: lambda x: vjp(lambda a: f(a) * a, x)[1](x)[0],
    # (A level of forward mode in a level is the primitive's.)
    "hessian": lambda f: lambda x: hessian(f)(x).sum(0),
}


@pytest.mark.parametrize("policy", [save_nothing, save_ops(torch.ops.aten.sin)], ids=["nothing", "sines"])
@pytest.mark.parametrize(
    ("nest", "level"), [(n, at) for n in NESTS for at in (False, True) if (n, at) != ("hessian", True)]
)
def test_ops_run_again_and_the_function_does_not(nest, level, policy):
    """Autograd's own graph is kept through handles, also where torch.func refuses hooks."""
    transform, captured, calls = NESTS[nest], CONSTANT if level else LEARNT, []

    def step(x):
        calls.append(1)
        return transform(lambda a: (a.sin() * captured).cos().sum())(x.exp())

    region = remat(step, policy=policy)

    def run(fn):
        x = X.clone().requires_grad_()
        if level:
            out, back, *_ = vjp(lambda x: fn(x).sin(), X)
        else:
            out = fn(x).sin()
            back = lambda cotangent: torch.autograd.grad(out, (x, LEARNT), cotangent)  # noqa: E731
        with OpCounter() as ops:
            got = back(torch.ones_like(out))
        return got, ops["sin"] + ops["cos"]

    want, fewest = run(step)
    counts = []
    for _ in range(3):
        calls.clear()
        got, count = run(region)
        assert len(calls) == 1
        same(got, want)
        counts.append(count)
    assert counts[0] == counts[1] == counts[2] and counts[0] >= fewest


def test_nothing_is_held_of_what_a_transform_saves():
    """8 steps of a gradient inside keep their arguments alone."""
    w = rand(64, 64).div(8).requires_grad_()

    def step(x):
        return x - 0.1 * grad(lambda a: ((a @ w).tanh() @ w).square().sum())(x)

    x = rand(128, 64)
    region = remat(step)
    for _ in range(3):
        live = LiveBytes()
        with live:
            out = x
            for _ in range(8):
                out = region(out)
        assert live.bytes <= 9 * x.nbytes


def test_a_write_after_a_transform_is_refused_as_without_remat():
    """torch says so in the backward; hooks of ours would hide it."""

    def fn(x):
        h = x.sin()
        out = grad(lambda a: (a * LEARNT).exp().sum())(h)
        with torch.no_grad():
            h.mul_(2)
        return out

    for function in (fn, region := remat(fn), region):
        x = X.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="inplace operation"):
            torch.autograd.grad(function(x).sum(), (x, LEARNT))


@pytest.mark.parametrize("captured", [True, False], ids=["given", "batched"])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: lambda a, b: b,
        lambda x: lambda a, b: x,
        lambda x: lambda a, b: a.sin() * b * x.cos(),
        lambda x: lambda a, b: a * (2.0 if b is x else 3.0),
    ],
    ids=["argument", "captured", "both", "by identity"],
)
def test_a_region_under_jvp_in_a_region_that_captures(make, captured):
    """What the outer one captures is of levels that are not there when the primitive runs it below them."""

    def found(region):
        def loss(x):
            def outer(a):
                given = x if captured else a
                return jvp(lambda z: region(make(x))(z, given), (x,), (x,))[1].sin()

            return (vmap(region(outer))(torch.stack([x, 2 * x])).sum(0) * x).sum()

        return grad(lambda x: (grad(loss)(x) * x).sum())(X)

    same(found(remat), found(lambda f: f))
