"""Forward-mode derivatives inside a region: its ops cannot be compared, so its results are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from remat import RematError, remat, save_matmuls, save_nothing
from tests.helpers import LiveBytes, rand, same, unseen


class Switched(nn.Module):
    """Reads what no op has filled, so that its function runs again; a flag says of what."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(rand(4, 4)), nn.Parameter(rand(4))
        self.now = {"on": True, "noise": 0.0}  # items of containers are not put back

    def forward(self, x: Tensor) -> Tensor:
        at = x if self.now["on"] else x + 1
        tangent = torch.func.jvp(lambda t: t.sin() * x, (at,), (x,))[1] + self.now["noise"]
        return torch.addmm(self.scale, (tangent * unseen(tangent, 0.5)).cos(), self.weight)


def steps(module: Switched, region: Any, change: Any = None) -> list[Tensor]:
    found = []
    for _ in range(2):
        out = region(rand(3, 4))
        if change is not None:
            change(module)
        found += torch.autograd.grad(out.square().sum(), [module.weight, module.scale])
    return found


@pytest.mark.parametrize(("name", "value"), [("on", False), ("noise", 0.1)])
def test_what_changes_before_the_backward_is_refused(name, value):
    module = Switched()
    with pytest.raises(RematError, match="it returned other numbers"):
        steps(module, remat(module), lambda module: module.now.update({name: value}))


def test_what_may_draw_other_numbers_returns_others():
    module = Switched()
    region = remat(lambda x: nn.functional.dropout(module(x)), preserve_rng_state=False)
    assert len(steps(module, region)) == 4


def test_it_goes_unasked_by_the_users_word():
    module = Switched()
    region = remat(module, determinism_check="none")
    assert len(steps(module, region, lambda module: module.now.update(noise=0.1))) == 4


def test_a_policy_holds_nothing_that_a_second_run_would_not_take():
    """Ops under forward mode cannot be told in it, so that no kept value stands for one."""
    w = rand(4, 4, seed=1).requires_grad_()

    def fn(x):
        h = (x.sin() @ w).cos()
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(forward_ad.make_dual(h * 0, h.T.contiguous().T) * 2).tangent
        assert tangent is not None
        return ((tangent * unseen(tangent, 0.5)) @ w).sin()

    def run(fn):
        x = rand(3, 4).requires_grad_()
        with LiveBytes() as live:
            out = fn(x).cos().sum()
        return live.bytes, torch.autograd.grad(out, [x, w])

    held = []
    for policy in (save_nothing, save_matmuls):
        region = remat(fn, policy=policy)
        for _ in range(2):
            kept, gradients = run(region)
            same(gradients, run(fn)[1])
            held.append(kept)
    assert held == [held[0]] * 4
