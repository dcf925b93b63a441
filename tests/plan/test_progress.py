"""A plan that takes long says what it does; others say nothing."""

import pytest
import torch

from remat import checkpoint_policy, remat
from tests.plan.inside import progress


@pytest.mark.parametrize("first", [0.0, 1e3])
def test_a_first_call_that_takes_long_says_how_far_it_is(monkeypatch, told, first):
    monkeypatch.setattr(progress, "_FIRST", first)
    monkeypatch.setattr(progress, "_EVERY", 0.0)

    def rotations(x):
        for _ in range(70):
            x = x.sin()
        return x

    region = remat(rotations, policy=checkpoint_policy(budget=0.5))
    x = torch.ones(3, requires_grad=True)
    region(x).sum().backward()
    if first:
        assert not told
        return
    assert "Planning rotations for its first call under a budget: 64 ops traced" in told[0]
    assert any("70 ops priced" in line for line in told) and "The plan of rotations took" in told[-1]
    told.clear()
    region(x).sum().backward()
    assert not told
