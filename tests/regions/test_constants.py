"""What depends on nothing that a region is given is computed once in its backward, and truly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from remat import remat, save_matmuls, save_nothing
from tests.helpers import OpCounter, scalar
from tests.rotary import block, chain, inputs


def gradients(out: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    return list(torch.autograd.grad(scalar(out), leaves))


def sines(region, depth: int = 3) -> tuple[int, list[Tensor]]:
    w, x = inputs()
    out = chain(region, depth)(w, x)
    with OpCounter() as ops:
        got = gradients(out, (w, x))
    return ops["sin"], got


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=repr)
def test_each_region_evaluates_its_own_sines(policy):
    _, expected = sines(block)
    for _ in range(2):  # a first and a later call
        count, got = sines(remat(block, policy=policy))
        assert count == 3 and all(map(torch.equal, got, expected))
