"""Plans know that values saved for their shape alone take no bytes and are not made again."""

import pytest
import torch
import torch.nn.functional as F

from remat import checkpoint_policy, remat, saved_residuals
from tests.helpers import TORCH

pytestmark = pytest.mark.skipif(TORCH != (2, 13), reason="the table was made on torch 2.13")

INDEX = torch.zeros(1, 3, 8, 8, dtype=torch.int64)
PROGRAMS = {
    "pooling": lambda x: F.avg_pool2d(x.sin(), 2),
    "padding": lambda x: F.pad(x.exp().neg(), (1, 1, 1, 1), "reflect"),
    "taking along": lambda x: x.cumsum(0).take_along_dim(INDEX, 0),
    "Fourier transform": lambda x: torch.view_as_real(torch.fft.rfft2(x.tan() * 2)),
    "two stages": lambda x: F.avg_pool2d(F.pad(x * 3, (1, 1, 1, 1), "replicate"), 2).sin(),
}


def given():
    torch.manual_seed(0)
    return torch.rand(2, 3, 8, 8, requires_grad=True)


@pytest.mark.parametrize("budget", [0, 0.9, "free", 1.0])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name, budget):
    fn, x = PROGRAMS[name], given()
    region = remat(fn, policy=checkpoint_policy(budget=budget))
    (right,) = torch.autograd.grad(fn(x).sum(), x)
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(region(x).sum(), x)[0], right)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_charges_no_bytes_for_them(name):
    fn, x = PROGRAMS[name], given()
    policy = checkpoint_policy(budget="free")
    plan = policy.plan(fn, x)
    # An operand of the first op, its result, nothing, a result, and what the last sine of two stages reads.
    left = {"taking along": 0, "two stages": 4 * 2 * 3 * 5 * 5}.get(name, x.nbytes)
    # (To make an index as large again takes a nanosecond.)
    assert plan.kept_bytes == left and plan.cost < 1e-8
    assert saved_residuals(remat(fn, policy=policy), x).kept_bytes <= left


def test_no_op_is_run_again_for_them():
    plan = checkpoint_policy(budget=0).plan(lambda x: F.avg_pool2d(x * 3, 2), given())
    assert plan.kept_bytes == 0 and plan.cost == 0


def test_without_a_plan_autograd_keeps_them():
    x = given()
    plan = checkpoint_policy(budget=0).plan(PROGRAMS["two stages"], x)
    assert plan.default_bytes > x.nbytes


def test_a_value_that_another_op_reads_is_planned():
    def fn(x):
        y = x.cumsum(0)
        return F.avg_pool2d(y, 2).sum() + y.square().sum()

    x = given()
    plan = checkpoint_policy(budget=1.0).plan(fn, x)
    assert plan.kept_bytes >= x.nbytes
    region = remat(fn, policy=checkpoint_policy(budget=1.0))
    assert torch.equal(*[torch.autograd.grad(f(x), x)[0] for f in (region, fn)])


def test_other_layouts_are_kept():
    x = given().detach().to(memory_format=torch.channels_last).requires_grad_()
    plan = checkpoint_policy(budget="free").plan(lambda x: F.avg_pool2d(x.exp(), 2), x)
    assert plan.kept_bytes == x.nbytes
