"""Forward mode over a region."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import grad, jacfwd, linearize, vmap

from remat import remat
from tests.helpers import (
    POLICIES,
    OpCounter,
    batched,
    check,
    jvp,
    matrix,
    of_inexact,
    rand,
    same,
    scalar,
    tangents,
)


@matrix("jvp")
def test_jvp(name, policy):
    def run(fn, args):
        fn, args = of_inexact(fn, args)
        return jvp(fn, args, tangents(args))

    check(name, policy, run)


@matrix("jvp", policies=("nothing", "matmuls"))
def test_linearize(name, policy):
    def run(fn, args):
        fn, args = of_inexact(fn, args)
        outputs, push = linearize(fn, *args)
        return outputs, (push(*tangents(args)), push(*args))

    check(name, policy, run)


@matrix("jvp", "jacobian", policies=("nothing", "matmuls", "rule"))
def test_jacfwd(name, policy):
    def run(fn, args):
        fn, args = of_inexact(fn, args)
        return (), jacfwd(fn, randomness="same")(*args)

    check(name, policy, run)


@matrix("jvp", "grad_jvp")
def test_grad_of_jvp(name, policy):
    def run(fn, args):
        fn, args = of_inexact(fn, args)
        return (), grad(lambda *args: scalar(jvp(fn, args, tangents(args))), tuple(range(len(args))))(*args)

    check(name, policy, run, order=2)


@matrix("jvp", "vmap", policies=("nothing", "matmuls"))
def test_jvp_of_vmap(name, policy):
    def run(fn, args):
        fn, args = of_inexact(vmap(fn, randomness="different"), batched(args))
        return jvp(fn, args, tangents(args))

    check(name, policy, run)


@pytest.mark.parametrize("policy", POLICIES)
def test_dual_numbers(policy):
    """Forward mode by torch.autograd.forward_ad, without torch.func."""

    def run(fn):
        with forward_ad.dual_level():
            out = fn(forward_ad.make_dual(rand(2, 2), rand(2, 2, seed=1)), rand(2, 2, seed=2))
            return forward_ad.unpack_dual(out)

    def region(x, w):
        return torch.tanh(x @ w)

    same(tuple(run(remat(region, policy=POLICIES[policy]))), tuple(run(region)))


def test_jvp_of_jvp():
    def twice(fn):
        return jvp(lambda x: jvp(fn, (x,), (x,))[1], (rand(3),), (rand(3, seed=1),))

    same(twice(remat(lambda x: (x.sin() * x).exp())), twice(lambda x: (x.sin() * x).exp()))


def test_forward_mode_evaluates_the_region_once():
    with OpCounter() as ops:
        jvp(remat(lambda x: x.exp().sinh()), (rand(3),), (rand(3),))
    assert ops["exp"] == 1 and ops["sinh"] == 1
