"""Transforms of `torch.func` inside regions, scans and loops: of arguments, and of constants from outside."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remat import remat, save_matmuls, save_nothing, save_ops, scan_remat, while_remat
from tests.helpers import LiveBytes, crossed, rand, same, sparse

X = rand(3)
CONSTANT = rand(3)
LEARNT = rand(3).requires_grad_()


def energy(a, h):
    return (a.sin() * h.cos()).sum() + (a * h).prod()


# What a step makes of what it has (h), of a tensor that it captures (y), and of `energy` or a region of it.
INSIDE = {
    "grad": lambda h, y, e: grad(lambda a: e(a, h))(y),
    "grad of an argument": lambda h, y, e: grad(lambda a: e(y, a))(h),
    "grad of a tree": lambda h, y, e: grad(lambda p: e(p["y"], h))({"y": y})["y"],
    "vjp": lambda h, y, e: vjp(lambda a: (a * h).sin(), y)[1](h)[0],
    "vjp of an argument": lambda h, y, e: vjp(lambda a: (a * y).sin(), h)[1](h)[0],
    "jacrev": lambda h, y, e: jacrev(lambda a: (a * h).sin())(y).sum(0),
    "jacrev of an argument": lambda h, y, e: jacrev(lambda a: (a * y).sin())(h) @ h,
    "jacfwd": lambda h, y, e: jacfwd(lambda a: (a * h).sin())(y).sum(0),
    "jvp": lambda h, y, e: jvp(lambda a: (a * h).sin(), (y,), (h,))[1],
    "hessian": lambda h, y, e: hessian(lambda a: e(a, h))(y).sum(0),
    "vmap": lambda h, y, e: vmap(lambda a: e(a * h, h))(y),
    "vmap of rows": lambda h, y, e: vmap(lambda a, b: (a * b).sin())(y, h),
    "vmap of grad": lambda h, y, e: vmap(grad(lambda a: (a * h).sin().sum()))(y),
}
AROUND = {
    "region": lambda step: lambda x: remat(step)(remat(step, policy=save_matmuls)(x)),
    "scan": lambda step: lambda x: scan_remat(lambda c, _: (step(c), None), x, length=2)[0],
    "scan, all kept": lambda step: (
        lambda x: scan_remat(
            lambda c, _: (step(c), None), x, length=2, checkpoints="all", policy=save_matmuls
        )[0]
    ),
    "loop": lambda step: (
        lambda x: while_remat(lambda c: c[1] < 2, lambda c: (step(c[0]), c[1] + 1), (x, 0), checkpoints=2)[0]
    ),
}


def plainly(fn):
    x = X.clone().requires_grad_()
    first = torch.autograd.grad(fn(x).sin().sum(), x, create_graph=True)
    return first, torch.autograd.grad(first[0].sum(), x)


WAYS = {
    "plainly": plainly,
    "jvp": lambda fn: jvp(fn, (X,), (X,)),
    "vmap of grad": lambda fn: vmap(grad(lambda x: fn(x).sin().sum()))(torch.stack([X, 2 * X])),
    "no gradients": lambda fn: fn(X),
    "grad": lambda fn: grad(lambda x: fn(x).sin().sum())(X),
    "vmap": lambda fn: vmap(fn)(torch.stack([X, 2 * X])),
    "vmap of jvp": lambda fn: vmap(lambda t: jvp(fn, (X,), (t,)))(torch.stack([X, 2 * X])),
    "jvp of grad": lambda fn: jvp(grad(lambda x: fn(x).sin().sum()), (X,), (X,)),
    "hessian": lambda fn: hessian(lambda x: fn(x).sin().sum())(X),
    "grad of grad": lambda fn: grad(lambda x: grad(lambda x: fn(x).sin().sum())(x).sum())(X),
}


@pytest.mark.parametrize(("inside", "around", "way"), sparse(crossed(INSIDE, AROUND, WAYS, every=17)))
def test_derivatives_are_as_without_remat(inside, around, way):
    captured = LEARNT if len(inside + way) % 2 else CONSTANT
    region = remat(energy, policy=save_nothing)
    step = INSIDE[inside]
    plain = lambda x: step(step(x, captured, energy), captured, energy)  # noqa: E731
    expected = WAYS[way](plain)
    for inner in (energy, region):
        fn = AROUND[around](lambda h, inner=inner: step(h, captured, inner))
        for _ in range(2):
            got = WAYS[way](fn)
            assert len(tree_leaves(got)) == len(tree_leaves(expected))
            same(got, expected)


def pulled_back(x):
    y, back, *_ = vjp(torch.sin, x)
    return back(y.cos())[0]


@pytest.mark.parametrize("way", ["jvp of grad", "grad of jvp", "jvp of jvp of grad", "hessian"])
def test_tangents_of_what_a_transform_saves(way):
    """What a node saves is hooked when the function is through, with the tangents that it had."""
    push = lambda f: lambda x: jvp(f, (x,), (x.cos(),))[1]  # noqa: E731
    energy = lambda fn: lambda x: fn(x).sin().sum()  # noqa: E731
    ways = {
        "jvp of grad": lambda fn: push(grad(energy(fn))),
        "grad of jvp": lambda fn: grad(push(energy(fn))),
        "jvp of jvp of grad": lambda fn: push(push(grad(energy(fn)))),
        "hessian": lambda fn: hessian(energy(fn)),
    }
    region = remat(pulled_back)
    for _ in range(3):
        same(ways[way](region)(X), ways[way](pulled_back)(X))


class Ops(TorchDispatchMode):
    """How many sines and cosines ran."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.sin.default, torch.ops.aten.cos.default)
        return func(*args, **(kwargs or {}))


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
        with Ops() as ops:
            got = back(torch.ones_like(out))
        return got, ops.count

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
