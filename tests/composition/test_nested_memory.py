"""Regions inside regions under torch.func: results that lie in one memory, and memory that is gone."""

import pytest
import torch
from torch.func import grad

from remat import remat, save_matmuls, save_nothing
from tests.helpers import rand, same


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=["nothing", "matmuls"])
def test_a_transform_inside_a_region_runs_python_once_in_a_first_call(policy):
    norm, calls = torch.nn.BatchNorm1d(4).double(), []

    def energy(x):
        calls.append(1)
        h = torch.nn.functional.dropout(norm(x), 0.5)
        return h * grad(lambda x: x.sin().sum())(x)

    x = rand(3, 4).requires_grad_()
    torch.manual_seed(0)
    out = remat(energy, policy=policy)(x)
    drawn = torch.rand(1)
    assert len(calls) == 1 and int(norm.num_batches_tracked) == 1  # pyright: ignore[reportArgumentType]
    got = torch.autograd.grad(out.sum(), x)
    norm.reset_running_stats()
    torch.manual_seed(0)
    out = energy(x)
    same(drawn, torch.rand(1), 0.0)
    same(got, torch.autograd.grad(out.sum(), x))
