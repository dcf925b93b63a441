"""Saved-tensor hooks of the user's around regions whose later calls are not followed to their end: what such
a call packs is what one packs that is recorded from its start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from remat import checkpoint_policy, remat, save_all_but_names, save_everything, save_matmuls, save_nothing
from tests.helpers import crossed
from tests.ways import fetched

W = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()
POLICIES = [save_nothing, save_matmuls, save_everything, checkpoint_policy(budget=0.5)]
pytestmark = pytest.mark.filterwarnings("ignore:Policy", "ignore:A budget", "ignore:.*cannot be planned")


def given() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 1, 12, dtype=torch.float64).view(3, 4)
    return x.clone().requires_grad_(), (x * 0.5 + 1).requires_grad_()


CONSTANT = torch.linspace(0, 1, 12, dtype=torch.float64).view(3, 4)


# -- dead code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [torch.relu, torch.tanh, torch.exp, torch.softmax])
def test_what_dead_code_saves_of_its_own_results(op: Any) -> None:
    """A node that saves its result is gone with it, also where a first call counts what would be held."""
    packs: list[Any] = []

    def run(x: Tensor) -> Tensor:
        h = x.exp().tanh() - 0.5
        _unused = (op(h, -1) if op is torch.softmax else op(h)) - x
        return h * CONSTANT.sigmoid()

    region = remat(run, policy=save_all_but_names("h"))
    with saved_tensors_hooks(lambda t: (packs.append(t.clone()), t)[1], lambda t: t):
        region(given()[0]).sum().backward()
    h = given()[0].exp().tanh().detach() - 0.5
    dead = op(h, -1) if op is torch.softmax else op(h)
    assert packs and not any(torch.equal(t, dead) for t in packs)


# -- caches that are emptied ---------------------------------------------------------------------------


class Emptied:
    """A cache that some calls find empty, though they follow what an earlier one did."""

    def __init__(self, make: Callable[[], Tensor], read: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.make, self.read, self.found = make, read, dict[str, Tensor]()

    def __call__(self, x: Tensor) -> Tensor:
        if "table" not in self.found:
            self.found["table"] = self.make()
        return self.read(x @ W, self.found["table"]).sin() * x


def table() -> Tensor:
    return torch.linspace(0.5, 1.0, 4).cos()


EMPTIED = {
    "table": lambda: Emptied(table, lambda h, t: t * h),
    "table in another dtype": lambda: Emptied(table, lambda h, t: t.to(torch.float64) * h),
    "mask": lambda: Emptied(lambda: table() < 0.7, lambda h, t: h.masked_fill(t, 0.0)),
    "table of a table": lambda: Emptied(
        lambda: torch.stack([table(), table()]).sum(0), lambda h, t: h * t.exp()
    ),
    "view of a table": lambda: Emptied(table, lambda h, t: t[None].expand_as(h) * h),
}


@pytest.mark.parametrize(("name", "policy"), crossed(EMPTIED, POLICIES, every=1))
def test_a_cache_that_is_filled_again(name: str, policy: Any) -> None:
    packs: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        packs[-1].append((tuple(tensor.shape), tensor.dtype))
        return tensor

    fn, other = EMPTIED[name](), EMPTIED[name]()
    region = remat(fn, policy=policy)
    for empty in (True, True, False, True, False):
        if empty:
            fn.found.clear()
        packs.append([])
        x, _ = given()
        with saved_tensors_hooks(pack, lambda t: t):
            loss = region(x).square().sum()
        got = torch.autograd.grad(loss, (x, W))
        torch.testing.assert_close(got, torch.autograd.grad(other(x).square().sum(), (x, W)))
    assert packs[1:] == packs[:1] * 4


@pytest.mark.parametrize(("name", "policy"), crossed(EMPTIED, POLICIES, every=1))
def test_torchs_checkpoint_around_a_cache_that_is_filled_again(name: str, policy: Any) -> None:
    fn, other = EMPTIED[name](), EMPTIED[name]()
    region = remat(fn, policy=policy)
    for _ in range(3):
        fn.found.clear()  # as at the start of an epoch
        x, _ = given()
        loss = checkpoint(region, x, use_reentrant=False).square().sum()
        got = torch.autograd.grad(loss, (x, W))
        torch.testing.assert_close(got, torch.autograd.grad(other(x).square().sum(), (x, W)))


# -- weights that hooks fetch, which a first call finds there, and drop ------------------------------------


@pytest.mark.parametrize("dead", [False, True], ids=["read", "dead"])
@pytest.mark.parametrize("policy", POLICIES)
def test_weights_that_hooks_fetch_and_drop(policy: Any, dead: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4).double()
    region = remat(lambda x, y: (layer(x).sin().exp(), y.sin() * x)[dead], policy=policy)
    with fetched(layer):
        calls = []
        for _ in range(3):
            x, y = given()
            packs: list[Any] = []
            with saved_tensors_hooks(
                lambda t, packs=packs: packs.append((t.shape, t.dtype)) or t, lambda t: t
            ):
                out = region(x, y)
            calls.append(packs)
            grads = torch.autograd.grad(out.sum(), x)
            x, y = given()
            again: Any = checkpoint(region, x, y, use_reentrant=False)
            torch.testing.assert_close(torch.autograd.grad(again.sum(), x), grads)
    assert calls[0] == calls[1] == calls[2]


@pytest.mark.parametrize("policy", POLICIES)
def test_casts_that_autocast_remembers(policy):
    """The first of two uses of a weight casts it, and a second run in a context of its own casts anew."""
    weight = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    fn = remat(lambda x: torch.tanh(x @ weight) * 2, policy=policy)
    found = []
    for call in (lambda x: torch.tanh(x @ weight) * 2, fn):
        x = torch.linspace(-2, 1, 12).view(3, 4).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            outs = [checkpoint(call, t, use_reentrant=False) for t in (x, 2 * x)]
            loss = torch.stack([out.double().square().sum() for out in outs]).sum()
        found.append(torch.autograd.grad(loss, [x, weight]))
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)
