"""Second order under torch.func."""

import pytest
import torch
from torch.func import grad, vmap

from remat import remat
from tests.helpers import (
    POLICIES,
    check,
    jvp,
    loss_of,
    matrix,
    of_inexact,
    rand,
    same,
    scalar,
    tangents,
    vjp,
)


def all_of(args):
    return tuple(range(len(args)))


@matrix("second")
def test_grad_of_grad(name, policy):
    def run(fn, args):
        fn, args = of_inexact(fn, args)
        once = grad(loss_of(fn), all_of(args))
        return (), grad(lambda *args: scalar(once(*args)), all_of(args))(*args)

    check(name, policy, run, order=2)


@matrix("second", "jvp")
def test_jvp_of_grad(name, policy):
    def run(fn, args):
        fn, args = of_inexact(fn, args)
        return (), jvp(grad(loss_of(fn), all_of(args)), args, tangents(args))

    check(name, policy, run, order=2)


@matrix("second", policies=("nothing", "matmuls"))
def test_vjp_of_grad(name, policy):
    def run(fn, args):
        fn, args = of_inexact(fn, args)
        grads, pullback = vjp(grad(loss_of(fn), all_of(args)), *args)
        return (), (grads, pullback(grads))

    check(name, policy, run, order=2)


@pytest.mark.parametrize("policy", POLICIES)
def test_remat_around_grad(policy):
    """The region itself holds a gradient, as a meta-learning step does."""

    def step(w, x):
        return w - 0.1 * grad(lambda w: torch.tanh(x @ w).square().sum())(w)

    def run(wrap):
        region = wrap(step)
        return grad(lambda w: torch.sin(region(region(w, x), x)).sum())(w)

    w, x = rand(3, 3), rand(2, 3)
    same(run(lambda f: remat(f, policy=POLICIES[policy])), run(lambda f: f))


@pytest.mark.parametrize("policy", POLICIES)
def test_third_order_and_vmap_between(policy):
    def third(fn):
        return grad(lambda x: vmap(grad(grad(fn)))(x).sin().sum())(rand(4))

    region = remat(lambda x: torch.exp(torch.sin(x)), policy=POLICIES[policy])
    same(third(region), third(lambda x: torch.exp(torch.sin(x))))
