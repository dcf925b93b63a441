"""Nests drawn at random of regions, scans, loops of unknown length and captured weights, each differentiated
in ways drawn at random, against the same nest as plain Python.

For what pairs of features do not show: a scan inside a region that another scan captures, a vmap over a loop
that ends early, a forward derivative of the gradient of all that. `REMAT_NESTS=400:9000` draws other seeds.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vmap

from remat import (
    checkpoint_name,
    remat,
    save_everything,
    save_matmuls,
    save_names,
    save_nothing,
    scan_remat,
    while_remat,
)
from tests.compiled import compiled
from tests.helpers import same, sparse

START, STOP = map(int, os.environ.get("REMAT_NESTS", "0:60").split(":"))
DEPTH, WIDTH, ROWS, LOOPED = 3, 4, 2, 5
KINDS = ("scan", "loop", "region", "capture", "chain", "residual")
POLICIES = (save_nothing, save_matmuls, save_everything, save_names("hidden"))
Weights = tuple[Tensor, Tensor]
Step = Callable[[Weights, Tensor], Tensor]


def matmul(at: int) -> Step:
    return lambda w, x: checkpoint_name(torch.tanh(x @ w[at]), "hidden")


def pointwise(at: int) -> Step:
    return lambda w, x: torch.sin(x) * w[at].sum(0)


def chain(first: Step, then: Step) -> Step:
    return lambda w, x: then(w, first(w, x))


def residual(step: Step) -> Step:
    return lambda w, x: x + step(w, x)


def repeated(step: Step, times: int) -> Step:
    def run(w: Weights, x: Tensor) -> Tensor:
        for _ in range(times):
            x = step(w, x)
        return x

    return run


def scanned(step: Step, times: int, checkpoints: Any, policy: Any) -> Step:
    options = {} if policy is None else {"policy": policy}

    def run(w: Weights, x: Tensor) -> Tensor:
        last, _ = scan_remat(
            lambda h, _: (step(w, h), None), x, length=times, checkpoints=checkpoints, **options
        )
        return last

    return run


def looped(step: Step, times: int) -> Step:
    def run(w: Weights, x: Tensor) -> Tensor:
        more, body = (lambda c: c[1] < times), (lambda c: (step(w, c[0]), c[1] + 1))
        return while_remat(more, body, (x, torch.tensor(0)), checkpoints=2, max_steps=LOOPED)[0]

    return run


def region(step: Step, policy: Any) -> Step:
    return remat(step, policy=policy)


def capturing(step: Step, policy: Any) -> Step:
    return lambda w, x: remat(lambda x: step(w, x), policy=policy)(x)


def nest(draw: random.Random, kinds: Sequence[str], depth: int = DEPTH) -> tuple[Step, Step]:
    """The same function twice: as the library runs it, and as plain Python."""
    if not depth:
        step = draw.choice((matmul, pointwise))(draw.randrange(2))
        return step, step
    kind = draw.choice(kinds)
    ours, plain = nest(draw, kinds, depth - 1)
    policy, times = draw.choice(POLICIES), draw.randint(1, 3)
    match kind:
        case "chain":
            other, simple = nest(draw, kinds, depth - 1)
            return chain(ours, other), chain(plain, simple)
        case "residual":
            return residual(ours), residual(plain)
        case "scan":
            kept = draw.choice(("all", "sqrt", 1, 2))
            return scanned(ours, times, kept, draw.choice((None, policy))), repeated(plain, times)
        case "loop":
            return looped(ours, times), repeated(plain, times)
        case "region":
            return region(ours, policy), plain
        case _:
            return capturing(ours, policy), plain


# -- ways to differentiate: x is [ROWS, WIDTH], each weight [WIDTH, WIDTH] -----------------------------------


def of_weight(step: Step, w: Weights, x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda weight: step((weight, w[1]), x).sum()


def backward(step: Step, w: Weights, x: Tensor) -> Any:
    """Three calls: the later ones know what the first taught."""
    weight, x = w[0].clone().requires_grad_(), x.clone().requires_grad_()
    runs = [
        torch.autograd.grad(step((weight, w[1]), x).sum(), (x, weight), allow_unused=True) for _ in range(3)
    ]
    return [g if g is not None else torch.zeros(()) for run in runs for g in run]


def grad_of_x(step: Step, w: Weights, x: Tensor) -> Any:
    return grad(lambda x: step(w, x).sum())(x)


def grad_of_weight(step: Step, w: Weights, x: Tensor) -> Any:
    return grad(of_weight(step, w, x))(w[0])


def per_sample(step: Step, w: Weights, x: Tensor) -> Any:
    return vmap(lambda row: grad(of_weight(step, w, row))(w[0]))(x[:, None])


def over_weights(step: Step, w: Weights, x: Tensor) -> Any:
    return vmap(lambda weight: grad(lambda x: step((weight, w[1]), x).sum())(x))(torch.stack(w))


def grad_of_vmap(step: Step, w: Weights, x: Tensor) -> Any:
    return grad(lambda weight: vmap(lambda row: step((weight, w[1]), row))(x[:, None]).sum())(w[0])


def jacobian(step: Step, w: Weights, x: Tensor) -> Any:
    return jacrev(lambda weight: step((weight, w[1]), x).sum(0))(w[0])


def jacobian_of_a_number(step: Step, w: Weights, x: Tensor) -> Any:
    return jacrev(lambda x: step(w, x).sum())(x)


def tangent(step: Step, w: Weights, x: Tensor) -> Any:
    return jvp(lambda x: step(w, x), (x,), (x.cos(),))


def curvature(step: Step, w: Weights, x: Tensor) -> Any:
    return hessian(lambda scale: step(w, x * scale).sum())(torch.ones(WIDTH, dtype=x.dtype))


def mixed(step: Step, w: Weights, x: Tensor) -> Any:
    return grad(lambda x: grad(of_weight(step, w, x))(w[0]).pow(2).sum())(x)


WAYS = (
    backward, grad_of_x, grad_of_weight, per_sample, over_weights, grad_of_vmap, jacobian,
    jacobian_of_a_number, tangent, curvature, mixed,
)  # fmt: skip


def example(seed: int) -> tuple[Weights, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((WIDTH, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH))
    first, second, x = (torch.randn(s, generator=generator, dtype=torch.float64) / 2 for s in shapes)
    return (first, second), x


@pytest.mark.filterwarnings("ignore")  # names that a region does not have, regions that keep everything
@pytest.mark.parametrize("seed", sparse(range(START, STOP)))
def test_a_nest_has_the_derivatives_it_has_in_plain_python(seed: int) -> None:
    draw = random.Random(seed)
    ours, plain = nest(draw, KINDS)
    w, x = example(seed)
    for way in draw.sample(WAYS, 3):
        same(way(ours, w, x), way(plain, w, x), 1e-8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", sparse(range(START, START + (STOP - START) // 5), 6))
def test_a_nest_compiles_to_one_graph_with_these_derivatives(seed: int) -> None:
    torch._dynamo.reset()  # one lambda for all nests
    draw = random.Random(seed)
    ours, plain = nest(draw, [kind for kind in KINDS if kind != "loop"])  # whose length depends on data
    w, x = example(seed)
    way = draw.choice([way for way in WAYS if way is not backward])
    run = compiled(lambda w, x: way(ours, w, x))
    same(run(w, x), way(plain, w, x), 1e-8)
