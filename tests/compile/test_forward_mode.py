"""Forward mode in functions that torch.compile compiles, around regions and scans in each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.func import grad, hessian, jvp, vmap

from remat import associative_scan_remat, remat, scan_remat, tiled, while_remat
from tests.compiled import compiled
from tests.helpers import rand, same

nn = torch.nn.functional

W, G, B = rand(4, 4) / 2, rand(4), rand(4)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def block(h):
    centered = h - h.mean(-1, keepdim=True)
    return (centered / (centered.square().mean(-1, keepdim=True) + 1).sqrt() @ W).sin()


def scanned(fn, x, n=3):
    return scan_remat(lambda h, _: (fn(h), None), x, length=n)[0]


def still(x):
    """The first carry has no tangent at any step; torch pushes none through this op while it traces."""
    start = G.expand(2, 4) * 1.0, torch.ones_like(x)
    step = lambda c, _: ((nn.layer_norm(c[0], (4,), G, B), (c[1] * x).sin() + c[0]), None)  # noqa: E731
    a, b = scan_remat(step, start, length=3)[0]
    return a * b


def late(x):
    """The tangent is the first carry's in the third step."""
    start = x.detach() * 0.3, x.detach().cos(), torch.ones_like(x)
    step = lambda c, _: ((c[1].sin(), c[2].cos(), c[2] * x), None)  # noqa: E731
    a, b, c = scan_remat(step, start, length=4)[0]
    return a * b * c


PROGRAMS = {
    "still": still,
    "late": late,
    "region in scan in region": remat(lambda x: scanned(remat(block), x) * x),
    "still in region": remat(lambda x: scanned(remat(lambda h: still(x) + h), x, 2)),
    "vmap in region": remat(lambda x: vmap(remat(block))(torch.stack([x, x.sin()])).sum(0)),
    "associative": remat(lambda x: associative_scan_remat(lambda a, b: block(a) * b, torch.stack([x, x, x]))),
    "tiled": remat(lambda x: tiled(remat(block), tiles=2)(x)),
}
WAYS = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "vmap of jvp": lambda f: lambda x: vmap(lambda t: jvp(f, (x,), (t,))[1])(torch.stack([x, x.cos()])),
    "jvp of vmap": lambda f: lambda x: jvp(vmap(f), (torch.stack([x, x.cos()]),), (torch.stack([x, x]),))[1],
    "jvp of grad": lambda f: lambda x: jvp(grad(lambda x: f(x).square().sum()), (x,), (x.cos(),)),
    "hessian": lambda f: hessian(lambda x: f(x).square().sum()),
}


# Torch has no second derivatives of that norm while it traces.
ONCE = "still", "still in region"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, way",
    [
        (n, w)
        for i, n in enumerate(PROGRAMS)
        for j, w in enumerate(WAYS)
        if (i + j) % 3 == 0 and (n not in ONCE or w not in ("jvp of grad", "hessian"))
    ],
)
def test_derivatives(name, way):
    x, derived = rand(2, 4), WAYS[way](PROGRAMS[name])
    expected = derived(x)
    torch.testing.assert_close(compiled(derived)(x), expected)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("still", "jvp of grad"),
        pytest.param("still", "hessian", marks=pytest.mark.slow),
        pytest.param("still in region", "jvp of grad", marks=pytest.mark.slow),
    ],
)
def test_what_torch_does_not_derive_twice_leaves_no_levels(name, way):
    """The error comes from a backward of the graph; torch.func works afterwards."""
    x = rand(2, 4)
    with pytest.raises(BackendCompilerFailed, match="layer_norm"):
        compiled(WAYS[way](PROGRAMS[name]))(x)
    same(jvp(grad(lambda x: x.sin().sum()), (x,), (x,))[1], -x.sin() * x)
    loss = remat(block)(x.requires_grad_()).sum()
    loss.backward()
    x.grad = None


@pytest.mark.slow
def test_a_carry_without_a_tangent():
    x = rand(2, 4)
    run = WAYS["jvp"](still)
    same(compiled(run)(x)[1], run(x)[1])


def drawing(x):
    return scanned(lambda h: torch.poisson(h.detach().abs()) * h, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn",
    [remat(drawing), remat(grad(lambda x: drawing(x).sum()))],
    ids=["scan", "grad of scan"],
)
def test_what_fails_inside_leaves_no_levels(fn):
    """The error is the scan's own, and torch.func works afterwards."""
    x = rand(2, 4)
    with pytest.raises(BackendCompilerFailed, match="cannot be drawn again from a seed"):
        compiled(lambda x: jvp(fn, (x,), (x,))[1])(x)
    same(jvp(grad(lambda x: x.sin().sum()), (x,), (x,))[1], -x.sin() * x)


def test_a_loop_of_unknown_length_where_the_graph_breaks() -> None:
    """Its carry is a tuple, whose structure Dynamo would make by torch's classes."""

    def loop(x: Tensor) -> Tensor:
        init = (torch.tensor(0), x)
        return while_remat(lambda c: c[0] < 3, lambda c: (c[0] + 1, (c[1] * 1.5).sin()), init, max_steps=4)[1]

    def ways(of: Any) -> list[Any]:
        x = rand(4).requires_grad_()
        return [
            of(loop)(x.detach()),
            *torch.autograd.grad(of(loop)(x).sum(), x),
            of(lambda x: jvp(loop, (x,), (x,)))(x.detach()),
            jvp(of(loop), (x.detach(),), (x.detach(),)),
        ]

    same(ways(lambda f: torch.compile(f, backend="aot_eager")), ways(lambda f: f))
