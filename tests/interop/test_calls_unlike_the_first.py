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

from remat import remat, save_all_but_names, save_everything, save_matmuls, save_nothing, save_ops
from tests.helpers import crossed
from tests.ways import fetched

Wrap = Callable[..., Callable[..., Any]]
W = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()
POLICIES = [save_nothing, save_matmuls, save_everything]
aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:Policy")


def given() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 1, 12, dtype=torch.float64).view(3, 4)
    return x.clone().requires_grad_(), (x * 0.5 + 1).requires_grad_()


# -- what is called: each makes a function of x and y, whose parts `region` wraps ----------------------


class Step:
    """A function that counts its calls, as a schedule does, and reads the count as a number."""

    def __init__(self, body: Callable[[Wrap, int, Tensor, Tensor], Tensor]) -> None:
        self.body, self.calls = body, 0

    def __call__(self, region: Wrap) -> Callable[[Tensor, Tensor], Tensor]:
        self.calls = 0

        def run(x: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            return self.body(region, self.calls, x, y)

        return region(run)


def warmed_up(region: Wrap, at: int, x: Tensor, y: Tensor) -> Tensor:
    """What autograd saves is smaller than what is read and kept, but not smaller than what is read."""
    return (x.sum(0, keepdim=True) @ W * at).sin().exp()


def annealed(region: Wrap, at: int, x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x.sum(0, keepdim=True) @ W / (1 + at), -1).tanh()


def powers(region: Wrap, at: int, x: Tensor, y: Tensor) -> Tensor:
    return ((x.sum(0, keepdim=True) @ W) ** at).exp() + y.mean()


def in_a_region_inside(region: Wrap, at: int, x: Tensor, y: Tensor) -> Tensor:
    h = region(lambda a: (a[0] * at).sin().exp())(x.cos())
    return (h * y[0]).sin()


def cast_down(region: Wrap, at: int, x: Tensor, y: Tensor) -> Tensor:
    return ((x @ W).float() * (at / 4)).sigmoid().mul(2).sin().mean()


def inner(region: Wrap) -> Callable[[Tensor, Tensor], Tensor]:
    """What regions inside keep lies as what is read for the first time later; and some of it is dead."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        kept = region(lambda a, b: (a @ W).tanh() * b.sin().exp())(x, x.cos())
        _unused = kept.relu() - y
        return kept * CONSTANT.sigmoid()

    return region(run)


def inner_alias(region: Wrap) -> Callable[[Tensor, Tensor], Tensor]:
    def turned(a: Tensor) -> Tensor:
        h = a.sin()
        turned = h.detach()
        turned.t_()
        return h * h.exp() * turned.t()

    def run(x: Tensor, y: Tensor) -> Tensor:
        _unused = y.exp() + region(turned)(x)
        return (region(turned)(x) + 1).clamp_(-1, 2).sin() * CONSTANT.sigmoid()

    return region(run)


def two_inside(region: Wrap) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, y: Tensor) -> Tensor:
        h = region(lambda a: (a * 2).sin().exp())(x.tanh())
        k = region(lambda a, b: (a * b).tanh())(h, y)
        _unused = torch.softmax(k, -1) + 1
        return (k * CONSTANT).sin() * CONSTANT.exp()

    return region(run)


CONSTANT = torch.linspace(0, 1, 12, dtype=torch.float64).view(3, 4)


def slope(h: Tensor, power: int = 2) -> Tensor:
    h = h if h.requires_grad else h.detach().requires_grad_()
    return torch.autograd.grad(h.sin().pow(power).sum(), h, create_graph=True)[0]


def force(region: Wrap) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, y: Tensor) -> Tensor:
        return region(lambda a, b: slope(a.tanh().exp()) * b)(x @ W, y).sin()

    return region(run)


def force_of_a_stack(region: Wrap) -> Callable[[Tensor, Tensor], Tensor]:
    def part(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        v = torch.stack([row.exp() for row in a.tanh().unbind(1)], 1)
        return slope(v) * b, a

    def run(x: Tensor, y: Tensor) -> Tensor:
        h = (x @ W).tanh()
        g, a = region(part)(h, h)
        return (g * 1.5 + a).sin() * y

    return region(region(run))


def penalty(region: Wrap) -> Callable[[Tensor, Tensor], Tensor]:
    def score(a: Tensor) -> Tensor:
        return slope((a @ W).sigmoid().exp(), 3).pow(2).sum(-1)

    def run(x: Tensor, y: Tensor) -> Tensor:
        return region(lambda a: region(score)(a.cos()) + 1)(x).log() * y.sum(-1)

    return region(run)


PROGRAMS: dict[str, Callable[[Wrap], Callable[[Tensor, Tensor], Any]]] = {
    "a factor": Step(warmed_up),
    "a temperature": Step(annealed),
    "a power": Step(powers),
    "a constant in a region inside": Step(in_a_region_inside),
    "a constant, in another dtype": Step(cast_down),
    "a region inside": inner,
    "an alias in a region inside": inner_alias,
    "two regions inside": two_inside,
    "a gradient inside": force,
    "a gradient of a stack inside": force_of_a_stack,
    "a gradient two regions inside": penalty,
}
EVERY = [*POLICIES, save_all_but_names("h"), save_ops(aten.tanh, aten.mul, aten.sin)]


@pytest.mark.parametrize(("name", "policy"), crossed(PROGRAMS, EVERY, every=1))
@pytest.mark.parametrize("warm", [False, True], ids=["at once", "after a call without hooks"])
def test_every_call_packs_the_same(warm: bool, name: str, policy: Any) -> None:
    packs: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        packs[-1].append((tuple(tensor.shape), tensor.dtype))
        return tensor

    made = PROGRAMS[name]
    wants, want = [], made(lambda f: f)
    for _ in range(4 + warm):
        x, y = given()
        wants.append(torch.autograd.grad(want(x, y).double().square().sum(), (x, W), allow_unused=True))
    region = made(lambda f: remat(f, policy=policy))
    if warm:
        region(*given()).sum().backward()
    for at in range(4):
        packs.append([])
        x, y = given()
        with saved_tensors_hooks(pack, lambda t: t):
            loss = region(x, y).double().square().sum()
        got = torch.autograd.grad(loss, (x, W), allow_unused=True)
        torch.testing.assert_close(got, wants[at + warm])
    assert packs[1:] == packs[:1] * 3


@pytest.mark.parametrize(("name", "policy"), crossed(PROGRAMS, EVERY, every=1))
def test_torchs_checkpoint_around_it(name: str, policy: Any) -> None:
    """Its second run counts one call more, so that a number in the program is another one there."""
    found: list[Any] = []
    for wrap in (lambda f: f, lambda f: remat(f, policy=policy)):
        fn = PROGRAMS[name](wrap)
        for _ in range(3):
            x, y = given()
            loss = checkpoint(fn, x, y, use_reentrant=False).double().square().sum()
            found.append(torch.autograd.grad(loss, (x, W), allow_unused=True))
    if not isinstance(PROGRAMS[name], Step):
        torch.testing.assert_close(found[3:], found[:3])


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
