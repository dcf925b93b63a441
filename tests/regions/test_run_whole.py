"""Regions whose function runs again as a whole: what is inside them, and what goes with their graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from remat import remat, save_matmuls, save_nothing
from tests.helpers import LiveBytes, rand, unseen


def nested(x: Any, y: Any, region: Callable[..., Any]) -> Any:
    """A region beside a number that no op wrote, in a region."""

    def inner(a, b):
        return (a * b).sin() * a

    def outer(a, b):
        return region(inner)(a, b) * (a + unseen(a, 0.5)).tanh()

    return region(outer)(x, y)


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=repr)
@pytest.mark.parametrize("leaves", [(True, True), (True, False), (False, True), (False, False)])
def test_a_region_inside_that_holds_an_argument(leaves, policy):
    """Autograd holds leaves itself. Other arguments are handed to the region around, in both passes."""
    found = []
    regions: list[Any] = [lambda fn: fn, *[lambda fn: remat(fn, policy=policy)] * 2]
    for region in regions:
        x, y = rand(3, 4).requires_grad_(), rand(3, 4, seed=1).requires_grad_()
        args = [t if leaf else t.exp() for t, leaf in zip((x, y), leaves, strict=True)]
        out = nested(args[0], args[1], region)
        found.append(torch.autograd.grad(out.sum(), (x, y)))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.mark.parametrize("backward", [True, False])
def test_arguments_go_with_the_graph(backward):
    """No cycle holds them, so nothing waits for Python's garbage collector."""
    x = rand(16, 16).requires_grad_()
    region = remat(lambda a: (a + unseen(a, 0.5)).exp())
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            for _ in range(3):
                out = region(x * 2).sum()
                if backward:
                    out.backward()
                    x.grad = None
                del out
            assert live.bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=repr)
def test_a_penalty_of_a_normalized_region_in_a_region(policy):
    """The inner backward reads statistics as they were, in memory that no op of the region has made."""
    found = []
    for region in (lambda fn: fn, lambda fn: remat(fn, policy=policy)):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 1)).double()
        body = region(network)

        def penalty(x, body=body):
            x = x.clone().requires_grad_()
            score = body(x).sum()
            (slope,) = torch.autograd.grad(score, x, create_graph=True)
            return score + slope.square().sum()

        for seed in range(3):
            network.zero_grad()
            region(penalty)(rand(6, 4, seed=seed)).backward()
            found.append([p.grad for p in network.parameters()] + [b.clone() for b in network.buffers()])
    torch.testing.assert_close(found[3:], found[:3])
