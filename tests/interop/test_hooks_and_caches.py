"""Saved-tensor hooks of the user's around regions whose first call fills a cache: all calls pack the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from remat import checkpoint_policy, remat, save_everything, save_matmuls, save_nothing
from tests.helpers import crossed

pytestmark = pytest.mark.filterwarnings("ignore:A budget", "ignore:.*cannot be planned")
POLICIES = [save_nothing, save_matmuls, save_everything, checkpoint_policy(budget=0.5)]


class Cached(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read, self.table, self.known = read, None, {}
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))

    def of_width(self, width):
        if width not in self.known:
            self.known[width] = torch.linspace(0.5, 1.0, width).cos()
        return self.known[width]

    def attribute(self):
        if self.table is None:
            position = torch.arange(4.0)
            self.table = torch.stack([position.sin(), position.cos()]).sum(0)
        return self.table

    def forward(self, x):
        return self.read(self, x @ self.weight).sin() * x


READS = {
    "table": lambda m, h: m.of_width(4) * h,
    "table in another dtype": lambda m, h: m.of_width(4).to(torch.float64) * h,
    "table of a table": lambda m, h: (m.of_width(4) * m.attribute()).exp() * h,
    "view of a table": lambda m, h: m.attribute()[None].expand_as(h) * h,
    "mask": lambda m, h: h.masked_fill(m.of_width(4) < 0.7, 0.0) * m.attribute(),
}


def loss_of(model, around, x):
    return around(lambda x: model(x).double().square().sum())(x)


def checkpointed(fn):
    return lambda x: checkpoint(fn, x, use_reentrant=False)


@pytest.mark.parametrize(("read", "policy"), crossed(READS, POLICIES, every=1))
def test_a_table_that_a_first_call_caches(read, policy):
    """In torch's checkpoint, which counts what its second run packs, where that finds the table."""
    found = []
    for fn in (lambda m: m, lambda m: remat(m, policy=policy)):
        model = Cached(READS[read])
        x = torch.linspace(-2, 1, 12).view(3, 4).requires_grad_()
        for _ in range(2):
            loss = loss_of(fn(model), checkpointed, x)
            found.append(torch.autograd.grad(loss, [x, model.weight]))
    for got, want in zip(found[2:], found[:2], strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("read", "policy"), crossed(READS, POLICIES, every=1))
def test_every_call_packs_the_same(read, policy):
    packs = []

    def pack(tensor):
        packs[-1].append((tuple(tensor.shape), tensor.dtype))
        return tensor

    region = remat(Cached(READS[read]), policy=policy)
    for _ in range(3):
        packs.append([])
        x = torch.linspace(-2, 1, 12).view(3, 4).requires_grad_()
        with saved_tensors_hooks(pack, lambda t: t):
            loss = region(x).double().square().sum()
        loss.backward()
    assert packs[0] == packs[1] == packs[2]


@pytest.mark.parametrize("policy", POLICIES)
def test_casts_that_autocast_remembers(policy):
    """The first of two uses of a weight casts it, and a second run in a context of its own casts anew."""
    weight = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    fn = remat(lambda x: torch.tanh(x @ weight) * 2, policy=policy)
    found = []
    for call in (lambda x: torch.tanh(x @ weight) * 2, fn):
        x = torch.linspace(-2, 1, 12).view(3, 4).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(call, checkpointed, x) + loss_of(call, checkpointed, 2 * x)
        found.append(torch.autograd.grad(loss, [x, weight]))
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)
