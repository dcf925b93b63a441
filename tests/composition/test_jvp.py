"""Forward mode over a region."""

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import grad, jacfwd, linearize, vmap

from remat import remat
from tests.helpers import (
    FEW,
    POLICIES,
    OpCounter,
    batched,
    check,
    gradients,
    jvp,
    leaves_of,
    matrix,
    of_inexact,
    rand,
    same,
    scalar,
    tangents,
)

# Forward mode alone computes nothing again and asks no policy; but one function holds parameters of its own.
WITHOUT_BACKWARD: dict[str, Any] = dict(policies=("rule",), without=("functional_call",))


@matrix("jvp", **WITHOUT_BACKWARD)
def test_jvp(name, policy):
    def run(fn, args):
        fn, args = of_inexact(fn, args)
        return jvp(fn, args, tangents(args))

    check(name, policy, run, policed=False)


@matrix("jvp", "grad_jvp")
def test_backward_through_jvp(name, policy):
    """Values and their directional derivatives, both differentiated by plain autograd."""

    def run(fn, args):
        fn, args = of_inexact(fn, args)
        leaves = leaves_of(args)
        found = jvp(fn, tuple(leaves), tangents(args))
        return found[0], (found[1], gradients(found, leaves, materialize_grads=True))

    check(name, policy, run, order=2)


# torch.func folds what the region with a gradient inside computes.
@matrix("jvp", policies=FEW, without=("inner_transforms",), stride=9)
def test_linearize(name, policy):
    def run(fn, args):
        fn, args = of_inexact(fn, args)
        outputs, push = linearize(fn, *args)
        return outputs, (push(*tangents(args)), push(*args))

    check(name, policy, run)


@matrix("jvp", "jacobian", **WITHOUT_BACKWARD)
def test_jacfwd(name, policy):
    def run(fn, args):
        fn, args = of_inexact(fn, args)
        return (), jacfwd(fn, randomness="same")(*args)

    check(name, policy, run, policed=False)


@matrix("jvp", "grad_jvp")
def test_grad_of_jvp(name, policy):
    def run(fn, args):
        fn, args = of_inexact(fn, args)
        return (), grad(lambda *args: scalar(jvp(fn, args, tangents(args))), tuple(range(len(args))))(*args)

    check(name, policy, run, order=2)


@matrix("jvp", "vmap", **WITHOUT_BACKWARD)
def test_jvp_of_vmap(name, policy):
    def run(fn, args):
        fn, args = of_inexact(vmap(fn, randomness="different"), batched(args))
        return jvp(fn, args, tangents(args))

    check(name, policy, run, policed=False)


def dual_numbers(fn, w):
    """Forward mode by torch.autograd.forward_ad, without torch.func."""
    out = fn(forward_ad.make_dual(rand(2, 2), rand(2, 2, seed=1)), w)
    return tuple(forward_ad.unpack_dual(out))


def dense(x, w):
    return torch.tanh(x @ w)


def test_dual_numbers():
    w = rand(2, 2, seed=2)
    with forward_ad.dual_level():
        same(dual_numbers(remat(dense), w), dual_numbers(dense, w))


@pytest.mark.parametrize("policy", FEW)
def test_backward_through_dual_numbers(policy):
    w = rand(2, 2, seed=2).requires_grad_()
    with forward_ad.dual_level():
        for fn in (remat(dense, policy=POLICIES[policy]), dense):
            found = dual_numbers(fn, w)
            got = torch.autograd.grad(scalar(found), w), found
            expected = got if fn is not dense else expected  # noqa: F821
    same(expected, got)


def test_jvp_of_jvp():
    def twice(fn):
        return jvp(lambda x: jvp(fn, (x,), (x,))[1], (rand(3),), (rand(3, seed=1),))

    same(twice(remat(lambda x: (x.sin() * x).exp())), twice(lambda x: (x.sin() * x).exp()))


def test_forward_mode_evaluates_the_region_once():
    with OpCounter() as ops:
        jvp(remat(lambda x: x.exp().sinh()), (rand(3),), (rand(3),))
    assert ops["exp"] == 1 and ops["sinh"] == 1


HALVES = {
    "inner region": lambda wrap: lambda a: halves(wrap(torch.sin)(a)),
    "dual number": lambda _: lambda a: (a.sin(), forward_ad.unpack_dual(a.sin()).primal),
    "its primal": lambda _: lambda a: (lambda v: (v, forward_ad.unpack_dual(v).primal))(a.sin()),
}


def halves(v):
    return v[:, :2], v[:, 2:]


@pytest.mark.parametrize("case", HALVES)
@pytest.mark.parametrize("way", ["jvp", "jacfwd", "plain", "jvp_grad"])
def test_results_that_look_into_one_dual_number(case, way):
    """A dual number is a view of its primal: that has no tangent to make results of."""

    def total(wrap):
        region = wrap(HALVES[case](wrap))
        return lambda x: sum((k + 2) * part.sin().sum() for k, part in enumerate(region(x * 2)))

    def plain(fn, x):
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(fn(forward_ad.make_dual(x, x.cos()))).tangent
            assert out is not None
            return out.clone()

    ways = {
        "jvp": lambda fn, x: torch.func.jvp(fn, (x,), (x.cos(),))[1],
        "jacfwd": lambda fn, x: jacfwd(fn)(x),
        "plain": plain,
        "jvp_grad": lambda fn, x: torch.func.jvp(grad(fn), (x,), (x.cos(),))[1],
    }
    x = rand(3, 4)
    same(ways[way](total(remat), x), ways[way](total(lambda fn: fn), x))
