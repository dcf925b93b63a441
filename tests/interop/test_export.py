"""Programs without a backward that torch writes down of a model: its regions run as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from remat import checkpoint_policy, nn as remat_nn, remat, save_matmuls, save_nothing
from tests.helpers import rand, same

POLICIES = {"nothing": save_nothing, "matmuls": save_matmuls, "budget": checkpoint_policy(budget=0.5)}


def model(policy):
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double() for _ in range(2)]
    return remat_nn.apply(
        nn.Sequential(layers[0], remat(layers[1], policy=policy)), layers="0", policy=policy
    )


# The others are slow: each policy, and each way to export, is in the quick half.
STRICT = [
    pytest.param(
        policy,
        strict,
        id=f"{policy}-{'strict' if strict else 'loose'}",
        marks=[] if (at + strict) % 2 == 0 else pytest.mark.slow,
    )
    for at, policy in enumerate(POLICIES)
    for strict in (False, True)
]


@pytest.mark.parametrize(("policy", "strict"), STRICT)
def test_export_with_a_dynamic_batch(policy, strict):
    """A size without a value was looked up, and constants of a tape were looked for in the program."""
    fn = model(POLICIES[policy])
    sizes = ({0: torch.export.Dim("rows", min=2, max=64)},)
    program = torch.export.export(fn, (rand(3, 4),), dynamic_shapes=sizes, strict=strict)
    assert sum("linear" in str(node.target) for node in program.graph.nodes) == 4
    x = rand(7, 4)
    same(program.module()(x), fn(x))
    same(torch.export.export(fn, (rand(3, 4),), strict=strict).module()(rand(3, 4)), fn(rand(3, 4)))


class Both(nn.Module):
    """One module under two names, of which one is a region."""

    def __init__(self, policy):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
        self.region = remat(self.layer, policy=policy)

    def forward(self, x):
        return self.region(x) + self.layer(x)


@pytest.mark.parametrize("strict", [False, True], ids=["loose", "strict"])
@pytest.mark.parametrize("policy", POLICIES)
def test_export_of_a_module_that_is_also_held_as_itself(policy, strict):
    """Torch's stand-ins of shared modules could not be made of a region's class, which has a slot."""
    fn = Both(POLICIES[policy])
    x = rand(3, 4)
    same(torch.export.export(fn, (x,), strict=strict).module()(x), fn(x))
    assert type(fn.region) is fn.region.__class__ is not nn.Sequential


@pytest.mark.parametrize("policy", POLICIES)
def test_jit_trace(policy):
    """The second of its two runs, which it compares, was another graph."""
    fn = model(POLICIES[policy])
    traced: Any = torch.jit.trace(fn, (rand(3, 4),))
    x = rand(5, 4).requires_grad_()
    same(torch.autograd.grad(traced(x).sin().sum(), x), torch.autograd.grad(fn(x).sin().sum(), x))
