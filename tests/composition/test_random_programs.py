"""Programs drawn at random, regions inside regions, differentiated in many ways, with and without remat.

For what a table of functions does not think of: views that are packed, memory that is written in parts,
results that are arguments, values that only some results need. `REMAT_PROGRAMS=400:2000` runs other seeds.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from remat import remat
from remat.transforms.region import forget_all
from tests.composition.programs import N, draw, draw_flat
from tests.helpers import sparse

START, STOP = map(int, os.environ.get("REMAT_PROGRAMS", "0:60").split(":"))
Run = Callable[[Callable[..., Any], int], Any]


def inputs(seed: int, graded: bool = False) -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(N, N), (N, N), (N, N), (N, N), (N,)]
    x, y, *weights = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]
    weights = [w / 2 for w in weights]
    for t in (x, *weights) if graded else ():
        t.requires_grad_()
    torch.manual_seed(seed)
    return x, y, weights


def loss(out: Any) -> Tensor:
    parts = out if isinstance(out, tuple) else (out,)
    return torch.stack([(t * (k + 1)).sin().sum() for k, t in enumerate(parts)]).sum()


def backward(fn: Callable[..., Any], seed: int) -> Any:
    """Three calls: the later ones know what the first taught."""
    found = []
    for _ in range(3):
        x, y, weights = inputs(seed, graded=True)
        found.append(torch.autograd.grad(loss(fn(x, y, weights)), [x, *weights], allow_unused=True))
    return found


def once(fn: Callable[..., Any], seed: int) -> Any:
    x, y, weights = inputs(seed, graded=True)
    return torch.autograd.grad(loss(fn(x, y, weights)), [x, *weights], allow_unused=True)


def two_backwards(fn: Callable[..., Any], seed: int) -> Any:
    x, y, weights = inputs(seed, graded=True)
    total = loss(fn(x, y, weights))
    total.backward(retain_graph=True)
    total.backward()
    return [t.grad for t in (x, *weights)]


def partial_backwards(fn: Callable[..., Any], seed: int) -> Any:
    x, y, weights = inputs(seed, graded=True)
    total = loss(fn(x, y, weights))
    of_x = torch.autograd.grad(total, [x], allow_unused=True, retain_graph=True)
    return of_x, torch.autograd.grad(total, weights, allow_unused=True)


def double_backward(fn: Callable[..., Any], seed: int) -> Any:
    x, y, weights = inputs(seed, graded=True)
    total = loss(fn(x, y, weights))
    first = torch.autograd.grad(total, [x, *weights], allow_unused=True, create_graph=True)
    again = total + sum(t.square().sum() for t in first if t is not None)
    return first, torch.autograd.grad(again, [x, *weights], allow_unused=True)


def func_grad(fn: Callable[..., Any], seed: int) -> Any:
    x, y, weights = inputs(seed)
    return grad(lambda x, w: loss(fn(x, y, w)), (0, 1))(x, weights)


def grad_grad(fn: Callable[..., Any], seed: int) -> Any:
    x, y, weights = inputs(seed)
    first = lambda x: grad(lambda w: loss(fn(x, y, w)))(weights)  # noqa: E731
    return grad(lambda x: torch.stack([t.square().sum() for t in first(x)]).sum() + 0 * x.sum())(x)


def vmap_grad(fn: Callable[..., Any], seed: int) -> Any:
    x, y, weights = inputs(seed)
    return vmap(grad(lambda x, w: loss(fn(x, y, w)), (0, 1)), (0, None))(torch.stack([x, x.flip(0)]), weights)


def grad_vmap(fn: Callable[..., Any], seed: int) -> Any:
    x, y, weights = inputs(seed)
    return grad(lambda w: vmap(lambda x: loss(fn(x, y, w)))(torch.stack([x, x.flip(0)])).sum())(weights)


def forward_mode(fn: Callable[..., Any], seed: int) -> Any:
    x, y, weights = inputs(seed)
    return jvp(lambda x: loss(fn(x, y, weights)), (x,), (y,))


RUNS: list[Run] = [
    backward,
    two_backwards,
    partial_backwards,
    double_backward,
    func_grad,
    grad_grad,
    vmap_grad,
    grad_vmap,
    forward_mode,
]


@pytest.mark.parametrize("seed", sparse(range(START, STOP)))
def test_a_program_has_the_gradients_it_has_without_remat(seed: int) -> None:
    program, chance = draw(seed)
    plain = program.build(lambda fn, policy: fn)
    compared = 0
    for run in RUNS:
        if chance and run in (vmap_grad, grad_vmap):
            continue
        try:
            expected = run(plain, seed)
        except (RuntimeError, NotImplementedError):
            continue  # torch cannot differentiate it so
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names that a region does not have
            got = run(program.build(lambda fn, policy: remat(fn, policy=policy)), seed)
        _same(got, expected, run.__name__)
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize("seed", sparse(range(START, STOP)))
def test_two_programs_take_turns(seed: int) -> None:
    """All regions here share one code, and with it what was learnt of any of them."""
    programs = draw_flat(seed)
    plain = [p.build(lambda fn, policy: fn) for p in programs]
    regions = [p.build(lambda fn, policy: remat(fn, policy=policy)) for p in programs]
    forget_all()
    for run in (once, two_backwards, partial_backwards, double_backward):
        try:
            expected = [run(fn, seed) for fn in plain]
        except (RuntimeError, NotImplementedError):
            continue  # torch cannot differentiate it so
        for turn in (0, 0, 0, 1, 1, 1, 0, 1):
            _same(run(regions[turn], seed), expected[turn], run.__name__)


def _same(got: Any, expected: Any, what: str) -> None:
    if isinstance(expected, (tuple, list)):
        for one, other in zip(got, expected, strict=True):
            _same(one, other, what)
    elif got is None or expected is None:
        # Zero and "not connected" are told apart by plain autograd alone.
        assert all(t is None or not t.any() for t in (got, expected)), what
    else:
        torch.testing.assert_close(
            got, expected, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )
