"""Steps of fused optimizers between forward and backward: no version is counted up, and a region notices."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.func import vjp

from remat import RematError, remat, save_matmuls, scan_remat
from tests.helpers import rand

OPTIMIZERS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


def weight():
    return rand(4, 4, seed=1).float().requires_grad_()


def stepped(make, w, **how):
    w.grad = torch.ones_like(w)
    make([w], lr=0.5, fused=True, **how).step()


@pytest.mark.parametrize(("make", "policy"), list(zip(OPTIMIZERS, [None, save_matmuls] * 2, strict=True)))
def test_a_step_between_forward_and_backward(make, policy):
    w, x = weight(), rand(3, 4).float().requires_grad_()
    region = remat(lambda x: torch.sin(torch.tanh(x @ w) @ w), policy=policy)
    for _ in range(2):
        out = region(x)
        stepped(make, w)
        with pytest.raises(RematError, match="written"):
            out.sum().backward()


def test_groups_a_rate_that_is_a_tensor_and_calls_by_hand():
    w, other, x = weight(), weight(), rand(3, 4).float().requires_grad_()
    region = remat(lambda x: torch.sin(torch.tanh(x @ w) @ w))
    out = region(x)
    w.grad, other.grad = torch.ones_like(w), torch.ones_like(w)
    torch.optim.AdamW([{"params": [other]}, {"params": [w]}], lr=torch.tensor(0.5), fused=True).step()
    with pytest.raises(RematError, match="written"):
        out.sum().backward()
    out = region(x)
    with torch.no_grad():
        torch.ops.aten._fused_sgd_(
            [w], [w.grad], [], lr=0.5, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False,
            maximize=False, is_first_step=True,
        )  # fmt: skip
    with pytest.raises(RematError, match="written"):
        out.sum().backward()


def test_under_torch_func_and_in_a_scan():
    w, x = weight().detach().requires_grad_(), rand(3, 4).float()
    _, pull = vjp(remat(lambda x: torch.sin(torch.tanh(x @ w) @ w)), x)  # pyright: ignore[reportAssignmentType]
    stepped(torch.optim.SGD, w)
    with pytest.raises(RematError, match="written"):
        pull(torch.ones(3, 4))
    carry = rand(4).float().requires_grad_()
    out, _ = scan_remat(lambda c, _: (torch.tanh(c @ w), None), carry, None, length=6)
    stepped(torch.optim.Adam, w)
    with pytest.raises(RematError, match="written"):
        out.sum().backward()


def test_what_no_region_holds_counts_no_writes():
    w, held, x = weight(), weight(), rand(3, 4).float().requires_grad_()
    out = remat(lambda x: torch.sin(x @ held))(x)
    before = w._version
    stepped(torch.optim.AdamW, w)
    assert w._version == before
    out.sum().backward()
    del out
    before = held._version
    stepped(torch.optim.AdamW, held)
    assert held._version == before


def test_training_with_a_fused_optimizer_is_as_without_regions():
    def train(wrap):
        w, fn = weight(), None
        fn = wrap(lambda x: torch.sin(torch.tanh(x @ w) @ w))
        optimizer = torch.optim.AdamW([w], lr=0.1, fused=True)
        for i in range(4):
            optimizer.zero_grad()
            fn(rand(3, 4, seed=i).float()).square().sum().backward()
            optimizer.step()
        return w.detach()

    assert torch.equal(train(remat), train(lambda fn: fn))


@pytest.mark.slow
def test_a_program_without_regions_stays_as_it_is():
    code = (
        "import torch, remat\n"
        "has = lambda: 'ADInplaceOrView' in torch._C._dispatch_dump('aten::_fused_adamw_')\n"
        "assert not has()\n"
        "w = torch.ones(2, requires_grad=True)\n"
        "y = remat.remat(lambda: (w * w).sin().sum())()\n"
        "assert has()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
