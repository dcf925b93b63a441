"""Calls that look alike are not looked at for good, and what differs all the same is right."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch import nn

from remat import checkpoint_policy, remat, save_every_nth, save_nothing, saved_residuals
from tests.plan.inside import trusted


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.twice = nn.Linear(8, 8), nn.Linear(8, 8), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x).tanh()
        return self.two(x.sin() * x.cos() if self.twice else x.exp()).sigmoid()


def step(region: Any, layer: Layer) -> None:
    """Gradients are those without remat."""
    x = torch.randn(4, 8, requires_grad=True)
    wanted = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    got = torch.autograd.grad(region(x).sum(), [x, *layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_call_is_not_looked_at_where_many_looked_alike(looks: list[Any]) -> None:
    layer = Layer()
    region = remat(layer, policy=checkpoint_policy(budget=0.5, cost="flops"))
    for _ in range(trusted.ENOUGH + 1):
        step(region, layer)
    known = len(looks)
    step(region, layer)
    assert len(looks) == known
    region(torch.randn(5, 8, requires_grad=True))
    assert len(looks) == known + 1


def test_a_change_unseen_from_outside_is_right_at_once_and_planned_next(
    looks: list[Any],
) -> None:
    layer = Layer()
    region = remat(layer, policy=checkpoint_policy(budget=0.5, cost="flops"))
    fresh = remat(layer, policy=checkpoint_policy(budget=0.5, cost="flops"))
    for _ in range(trusted.ENOUGH + 2):
        step(region, layer)
    layer.twice, known = True, len(looks)
    step(region, layer)
    assert len(looks) == known
    step(region, layer)
    assert len(looks) == known + 1
    x = torch.randn(4, 8, requires_grad=True)
    again = [kept.shape for kept in saved_residuals(region, x)]
    assert again == [kept.shape for kept in saved_residuals(fresh, x)]


def test_what_changes_again_and_again_is_always_looked_at(looks: list[Any]) -> None:
    layer = Layer()
    region = remat(layer, policy=checkpoint_policy(budget=0.5, cost="flops"))
    for turn in range(4 * trusted.ENOUGH):
        layer.twice = turn % (trusted.ENOUGH + 2) == 0
        step(region, layer)
    known = len(looks)
    for _ in range(3):
        step(region, layer)
    assert len(looks) == known + 3


def calls_of(step: Any) -> int:
    """Python functions that a warm step calls."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(trusted.ENOUGH + 1):
        step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("wrapped", ["module", "closure", "either", "static"])
def test_a_budget_costs_few_calls_more_than_a_ready_policy(wrapped: str) -> None:
    layer, x = Layer(), torch.randn(4, 8, requires_grad=True)
    budget: Any = checkpoint_policy(budget=0.0, cost="flops")
    found = []
    for policy in (save_nothing, budget):
        policy = policy | save_every_nth(2, save_nothing) if wrapped == "either" else policy
        static: Any = {"static_argnums": 1} if wrapped == "static" else {}
        fn = {"module": layer, "static": lambda x, _: layer(x)}.get(wrapped, lambda x: layer(x))
        region = remat(fn, policy=policy, **static)
        given = (x, 2) if wrapped == "static" else (x,)
        found.append(calls_of(lambda region=region, given=given: region(*given).sum().backward()))
    assert found[1] <= found[0] + 50


def test_functions_of_one_code_are_told_apart_by_what_they_close_over(looks: list[Any]) -> None:
    """Layers of two kinds under one code: each has its own plan, and neither is a surprise."""
    layers = [Layer(), Layer()]
    layers[1].twice = True
    policy = checkpoint_policy(budget=0.5, cost="flops")
    regions = [remat(functools.partial(run, layer), policy=policy) for layer in layers]
    regions += [closed_over(layer, policy) for layer in layers]
    for _ in range(trusted.ENOUGH + 1):
        for region, layer in zip(regions, layers * 2, strict=True):
            step(region, layer)
    known = len(looks)
    for region, layer in zip(regions, layers * 2, strict=True):
        step(region, layer)
    assert len(looks) == known
    assert all(trust.surprises == 0 for trust in trusted._trusts.values())


def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


def closed_over(layer: Layer, policy: Any) -> Any:
    return remat(lambda x: layer(x), policy=policy)


def test_frozen_parameters_are_planned_anew() -> None:
    layer = Layer()
    policy = checkpoint_policy(budget=0.5, cost="flops")
    region = remat(layer, policy=policy)
    for _ in range(trusted.ENOUGH + 2):
        step(region, layer)
    layer.one.requires_grad_(False)
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        region(x).sum().backward()
    assert trusted._trusts[layer].surprises == 1
