"""Transforms of `torch.func` inside regions, scans and loops: of arguments, and of constants from outside."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

from remat import remat, save_matmuls, save_nothing, scan_remat, while_remat
from tests.helpers import crossed, rand, same, sparse

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
