"""What regions keep of CPU generators: one state in full for a run of small draws, and every number again."""

import pytest
import torch

from remat import remat, save_ops, saved_residuals, scan_remat
from tests.helpers import allocations

STATE = 5056


def held(fn, *args):
    """Bytes that the CPU's allocator holds after a call, its result aside; and the result."""
    changes, out = allocations(fn, *args)
    return sum(changes) - out.untyped_storage().nbytes(), out


def walk(y, w):
    for _ in range(100):
        y = 0.5 * y + torch.sin(w * y) * torch.randn(64)
    return y


def seeded(y, w):
    for i in range(100):
        y = 0.5 * y + torch.sin(w * y) * torch.randn(64, generator=torch.Generator().manual_seed(i))
    return y


def two_generators(y, w):
    own = torch.Generator().manual_seed(7)
    for _ in range(50):
        y = 0.5 * y + torch.sin(w * y) * torch.rand(64, generator=own) + torch.empty(64).exponential_(1.0)
    return y


def operands():
    torch.manual_seed(0)
    return [torch.randn(64, dtype=torch.float64, requires_grad=True) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("program", [seeded, two_generators], ids=lambda p: p.__name__)
def test_a_run_of_small_draws_keeps_one_state(program):
    # One for each draw was 510,656 bytes (100 draws), where torch's checkpoint holds 5,056.
    y, w = operands()
    region = remat(program)
    for _ in range(3):
        kept, out = held(region, y, w)
        assert kept <= 800  # the factor of each step, which torch makes a tensor of
        torch.autograd.grad(out.sum(), w)
    random = [r.bytes for r in saved_residuals(region, y, w) if r.why == "random"]
    assert 0 < sum(random) < 4 * STATE  # the rest is 64 bytes a draw


def test_a_large_draw_keeps_a_state_and_says_so():
    def region(x):
        return torch.nn.functional.dropout(x.sin(), 0.5).sin()

    found = saved_residuals(remat(region), torch.randn(200, 100, requires_grad=True))
    assert [r.bytes for r in found if r.why == "random"] == [4992, 64]


def test_kept_draws_are_passed_over():
    y, w = operands()
    region = remat(two_generators, policy=save_ops(torch.ops.aten.exponential_, torch.ops.aten.sin))
    torch.manual_seed(2)
    want = torch.autograd.grad(two_generators(y, w).sum(), (y, w))
    torch.manual_seed(2)
    assert all(map(torch.equal, torch.autograd.grad(region(y, w).sum(), (y, w)), want))


def test_states_of_a_scan():
    def step(y, _):
        return 0.5 * y + torch.sin(w * y) * torch.randn(64), None

    y, w = operands()
    kept, out = held(lambda y: scan_remat(step, y, length=100, checkpoints="sqrt")[0], y)
    assert kept < 5 * STATE  # 100,672 before: a state with each carry
    torch.manual_seed(4)
    got = torch.autograd.grad(scan_remat(step, y, length=100, checkpoints="sqrt")[0].sum(), (y, w))
    torch.manual_seed(4)
    assert all(map(torch.equal, got, torch.autograd.grad(walk(y, w).sum(), (y, w))))
