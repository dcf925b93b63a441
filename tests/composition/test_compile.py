"""torch.compile around every transform equals eager without remat, for every function of the table."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import starmap
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacrev, vmap

from remat import remat
from remat.transforms import value_and_grad
from tests.compiled import compiled
from tests.helpers import (
    CASES,
    POLICIES,
    batched,
    gradients,
    inexact,
    jvp,
    leaves_of,
    loss_of,
    matrix,
    of_inexact,
    same,
    scalar,
    sparse,
    tangents,
    vjp,
)

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def vmapped(fn):
    return vmap(fn, randomness="different")


def backward(fn, args, wrap: Compile):
    leaves = leaves_of(args)
    outputs = wrap(fn)(*leaves)
    return outputs, gradients(outputs, leaves)


def of_grad(fn, args, wrap: Compile):
    return wrap(grad(loss_of(fn), inexact(args)))(*args)


def of_value_and_grad(fn, args, wrap: Compile):
    return wrap(value_and_grad(loss_of(fn), inexact(args)))(*args)


def of_vjp(fn, args, wrap: Compile):
    loss, primals = of_inexact(loss_of(fn), args)

    def run(*primals):
        value, pull = vjp(loss, *primals)
        return value, pull(torch.ones_like(value))

    return wrap(run)(*primals)


def of_vmap(fn, args, wrap: Compile):
    return wrap(vmapped(fn))(*batched(args))


def vmap_of_grad(fn, args, wrap: Compile):
    return wrap(vmapped(grad(loss_of(fn), inexact(args))))(*batched(args))


def grad_of_vmap(fn, args, wrap: Compile):
    return wrap(grad(lambda *args: scalar(vmapped(fn)(*args)), inexact(args)))(*batched(args))


def grad_of_grad(fn, args, wrap: Compile):
    first = grad(loss_of(fn), inexact(args))
    return wrap(grad(lambda *args: scalar(first(*args)), inexact(args)))(*args)


def of_jvp(fn, args, wrap: Compile):
    part, primals = of_inexact(fn, args)
    return wrap(lambda *primals: jvp(part, primals, tangents(primals)))(*primals)


def of_jacrev(fn, args, wrap: Compile):
    loss, primals = of_inexact(loss_of(fn), args)
    return wrap(jacrev(loss, tuple(range(len(primals)))))(*primals)


def of_hessian(fn, args, wrap: Compile):
    loss, primals = of_inexact(loss_of(fn), args)
    return wrap(hessian(loss))(*primals)


def check(
    name: str, policy: str, run: Callable[..., Any], backend: str = "aot_eager", tolerance: float = 1e-10
) -> None:
    build, made = CASES[name].build, []
    want = run(*build(lambda fn: fn), lambda fn: fn)
    fn, args = build(lambda fn: remat(fn, policy=POLICIES[policy]))

    def once(fn):
        made.append(made[0] if made else compiled(fn, backend))
        return made[0]

    # A first call, which compiles, and a second of what it compiled.
    for _ in ("first", "second"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = run(fn, args, once)
        # Autocast rounds to bfloat16, and a compiler casts a weight once for both passes.
        same(got, want, 2e-2 if "autocast" in name else tolerance)


def of_table(*compositions: str, policies: tuple[str, ...], turn: int = 0) -> Any:
    """The quick suite has every sixth function; those that share one policy have others."""
    # Random draws are other ones when compiled; tests/compile/test_random.py looks at them.
    return matrix(*compositions, policies=policies, without=("dropout",), stride=6, turn=turn)


@of_table("backward", policies=("nothing", "rule"))
def test_backward(name, policy):
    check(name, policy, backward)


@of_table("grad", policies=("matmuls",))
def test_grad(name, policy):
    check(name, policy, of_grad)


@of_table("vmap", "grad", policies=("nothing",), turn=2)
def test_vmap_of_grad(name, policy):
    check(name, policy, vmap_of_grad)


FEW = ("mlp", "closure", "nested", "inputs_returned")
OTHERS = (of_value_and_grad, of_vjp, of_vmap, grad_of_vmap, grad_of_grad, of_jvp, of_jacrev, of_hessian)
# The policies take turns: compiling is slow.
TURNS = [
    pytest.param(name, run, ("nothing", "unbatched")[(i + k) % 2], id=f"{name}-{run.__name__}")
    for i, name in enumerate(FEW)
    for k, run in enumerate(OTHERS)
]


@pytest.mark.parametrize(("name", "run", "policy"), sparse(TURNS, 9))
def test_other_transforms(name, run, policy):
    check(name, policy, run)


THROUGH_INDUCTOR = [
    ("mlp", of_value_and_grad, "matmuls"),
    ("nested", of_grad, "nothing"),
    ("closure", vmap_of_grad, "unbatched"),
    ("functional_call", backward, "matmuls"),
    ("structures", backward, "rule"),
    ("mlp", grad_of_grad, "nothing"),
    ("mlp", of_jvp, "matmuls"),
    ("closure", of_hessian, "nothing"),
]


@pytest.mark.parametrize(("name", "run", "policy"), sparse(starmap(pytest.param, THROUGH_INDUCTOR), 8))
def test_through_inductor(name, run, policy):
    check(name, policy, run, "inductor", 1e-7)
