"""Jacobians and Hessians."""

import pytest
import torch
from torch.func import hessian, jacfwd, jacrev, vmap

from remat import remat
from tests.helpers import FEW, POLICIES, check, loss_of, matrix, of_inexact, rand, same


@matrix("jacobian")
def test_jacrev(name, policy):
    def run(fn, args):
        fn, args = of_inexact(fn, args)
        return (), jacrev(fn, tuple(range(len(args))))(*args)

    check(name, policy, run)


@matrix("hessian", policies=FEW)
def test_hessian(name, policy):
    def run(fn, args):
        fn, args = of_inexact(fn, args)
        return (), hessian(loss_of(fn))(*args)

    check(name, policy, run, order=2)


@pytest.mark.parametrize("policy", POLICIES)
def test_reverse_over_forward_and_the_other_orders(policy):
    def plain(x):
        return (torch.sin(x @ x) * x).sum()

    region = remat(plain, policy=POLICIES[policy])
    x = rand(3, 3)
    for outer in (jacfwd, jacrev):
        for inner in (jacfwd, jacrev):
            same(outer(inner(region))(x), outer(inner(plain))(x))


@pytest.mark.parametrize("policy", POLICIES)
def test_per_sample_hessian(policy):
    def plain(x, w):
        return torch.tanh(w @ x).square().sum()

    x, w = rand(2, 3), rand(4, 3)
    per_sample = lambda fn: vmap(hessian(fn), (0, None))(x, w)  # noqa: E731
    same(per_sample(remat(plain, policy=POLICIES[policy])), per_sample(plain))


def test_chunked_jacrev():
    def plain(x):
        return torch.exp(x).cumsum(0)

    same(jacrev(remat(plain), chunk_size=2)(rand(5)), jacrev(plain)(rand(5)))
    same(torch.autograd.functional.jacobian(remat(plain), rand(5)), jacrev(plain)(rand(5)))
