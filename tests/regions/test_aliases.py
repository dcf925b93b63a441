"""Tensors that share memory in ways that no op tells, and ops that give one of them another shape."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remat import checkpoint_policy, remat
from tests.helpers import rand, same

BUFFER = rand(4, 4, seed=7)


def raw_writes_outside(h, w):
    size = BUFFER.numel()
    there: Any = (ctypes.c_double * size).from_address(BUFFER.data_ptr())
    np.frombuffer(there, dtype=np.float64)[:] *= 0.5
    return h * BUFFER * BUFFER


# What needs data is planned from its first call on, with a warning; so are budgets that are too small.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*({text})")
    for text in ("cannot be planned", "below the least", "invariant checks", "beta state", "prototype stage")
]


def test_what_needs_data_is_told_of_before_it_ends_the_process():
    with pytest.warns(UserWarning, match="data_ptr goes to memory"):
        remat(lambda x: raw_writes_outside(x.sin(), x), policy=checkpoint_policy(budget=0.5))(rand(4, 4))


def test_a_tensor_given_the_memory_of_a_storage_runs_no_python_again() -> None:
    """As torch does before cuDNN's RNNs, to look at all weights as one."""
    calls = [0]

    def layer(x: Tensor, w: Tensor) -> Tensor:
        calls[0] += 1
        with torch.no_grad():
            flat = torch.empty(0, dtype=w.dtype).set_(w.untyped_storage(), 0, (w.numel(),), (1,))
        return (x @ w).sin() * flat.sum()

    x, w = rand(3, 4).requires_grad_(), rand(4, 4).requires_grad_()
    expected = torch.autograd.grad(layer(x, w).sum(), (x, w))
    region = remat(layer)
    for _ in range(3):
        calls[0] = 0
        same(torch.autograd.grad(region(x, w).sum(), (x, w)), expected)
        assert calls[0] == 1
        with torch.no_grad():
            w.mul_(0.5)
        expected = torch.autograd.grad(layer(x, w).sum(), (x, w))
