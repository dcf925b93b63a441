"""Gradients of gradients by plain autograd."""

import pytest
import torch

from remat import remat
from tests.helpers import POLICIES, check, gradients, leaves_of, matrix, rand, scalar


@matrix("second")
def test_double_backward(name, policy):
    def run(fn, args):
        leaves = leaves_of(args)
        outputs = fn(*leaves)
        first = [
            g for g in gradients(outputs, leaves, create_graph=True) if g is not None and g.requires_grad
        ]
        second = [g for g in gradients(first, leaves) if g is not None]
        return outputs, (first, second)

    check(name, policy, run, order=2)


@matrix("second", policies=("nothing", "matmuls"))
def test_gradient_penalty(name, policy):
    def run(fn, args):
        leaves = leaves_of(args)
        outputs = fn(*leaves)
        first = [g for g in gradients(outputs, leaves, create_graph=True) if g is not None]
        (scalar(outputs) + scalar(first)).backward()
        return outputs, [x.grad for x in leaves if x.grad is not None]

    check(name, policy, run, order=2)


@pytest.mark.parametrize("policy", POLICIES)
def test_third_order(policy):
    def run(fn):
        x = rand(3).requires_grad_()
        y = fn(x).sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y

    torch.testing.assert_close(run(remat(torch.sin, policy=POLICIES[policy])), -rand(3).cos())


@pytest.mark.parametrize("policy", POLICIES)
def test_gradcheck(policy):
    fn = remat(lambda x, w: torch.tanh(torch.sin(x @ w) @ w), policy=POLICIES[policy])
    args = (rand(2, 2).requires_grad_(), rand(2, 2, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(fn, args)
    assert torch.autograd.gradgradcheck(fn, args)
