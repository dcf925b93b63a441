"""Values in host memory: when each is sent, fetched, read and let go of; and that the numbers are right.

Copies are made by a lane that makes them as late as it may, like a stream that lags behind: who reads too
early sees NaN, and what is written too early is sent wrong. What is asserted of it holds on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.multiprocessing.reductions import StorageWeakRef

from remat import (
    checkpoint_name,
    checkpoint_policy,
    is_recomputing,
    offload,
    remat,
    save_everything,
    save_names,
    saved_residuals,
)
from tests.helpers import rand, same
from tests.lanes import Late
from tests.policies.inside import functions_as_they_are, transfer

WIDTH = 4


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    return Late.installed(monkeypatch)


def layer(x: Tensor, w: Tensor) -> Tensor:
    h = checkpoint_name(torch.sin(x @ w), "h")
    return x + torch.cos(h) @ w.T


def weights(*sizes: int) -> list[Tensor]:
    return [rand(WIDTH, size, seed=size).requires_grad_() for size in sizes]


def model(x: Tensor, ws: list[Tensor], wrap: Any = None) -> Tensor:
    region = layer if wrap is None else wrap
    for w in ws:
        x = region(x, w)
    return x.square().sum()


OFFLOADED = remat(layer, policy=offload(save_names("h")))
X = rand(3, WIDTH, seed=0)
THREE = (5, 6, 7)
SENT = ["send 5", "send 6", "send 7"]
READ = ["fetch 7", "fetch 6", "use 7", "fetch 5", "use 6", "use 5"]


def by_backward(region: Any, ws: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(model(X, ws, region), ws))


def by_grad(region: Any, ws: list[Tensor]) -> list[Tensor]:
    return grad(lambda ws: model(X, ws, region))([w.detach() for w in ws])


def by_vmap_of_grad(region: Any, ws: list[Tensor]) -> list[Tensor]:
    return vmap(grad(lambda ws, x: model(x, ws, region)), (None, 0))([w.detach() for w in ws], X)


def by_nested_grad(region: Any, ws: list[Tensor]) -> list[Tensor]:
    """Under a second level, whatever that differentiates, the function runs again."""
    return grad(lambda x: (x.sum(), by_grad(region, ws)), has_aux=True)(X)[1]


def by_backward_of_vmap(region: Any, ws: list[Tensor]) -> list[Tensor]:
    total = vmap(lambda x: model(x, ws, region))(X).sum()
    return list(torch.autograd.grad(total, ws))


RUNS = pytest.mark.parametrize(
    "run", [by_backward, by_grad, by_vmap_of_grad, by_nested_grad, by_backward_of_vmap]
)


@RUNS
def test_the_region_before_is_fetched_while_one_computes(late, run):
    ws = weights(*THREE)
    same(run(OFFLOADED, ws), run(None, ws), 0.0)
    assert late.take() == SENT + READ
    # While one is read there is at most one more.
    assert late.most == 2
    assert late.held() == set() and late.waiting() == set() and not transfer._passes


def test_host_memory_goes_as_the_backward_reads_it(late):
    ws, held = weights(*THREE), []

    def watched(x: Tensor, w: Tensor) -> Tensor:
        out = OFFLOADED(x, w)
        out.register_hook(lambda g: held.append(late.held()))
        return out

    model(X.clone().requires_grad_(), ws, watched).backward()
    # Before the backward of each region, from the last.
    assert held == [{5, 6, 7}, {5, 6}, {5}]
    assert late.held() == set()


LOOK: dict[str, Any] = {"at": lambda: None}


@torch.library.custom_op("remat_tests::looking", mutates_args=())
def looking(x: Tensor) -> Tensor:
    """A copy, and a look around: also in a recomputation, which runs ops and no Python of the region."""
    LOOK["at"]()
    return x.clone()


looking.register_autograd(lambda ctx, g: g)


def test_device_memory_goes_when_it_is_sent_and_when_it_is_read(late, monkeypatch):
    (w,) = weights(5)
    alive = []

    def fn(x: Tensor) -> Tensor:
        h = checkpoint_name(x @ w, "h")
        # No look at memory that regions notice: they would take what lies there for unknown.
        with functions_as_they_are():
            storage = StorageWeakRef(h.untyped_storage())
        out = torch.cos(h)
        del h
        late.finish()
        alive.append((is_recomputing(), not storage.expired()))
        return torch.sin(out)

    remat(fn, policy=offload(save_names("h")))(X).sum().backward()
    assert alive[0] == (False, False)
    late.take()

    def reads(x: Tensor) -> Tensor:
        h = checkpoint_name(x @ w, "h")
        return torch.sin(looking(h * 2)).sum()

    fetched: list[StorageWeakRef] = []
    arrived = late.arrived

    def noted(tensor: Tensor, mark: int) -> Tensor:
        fetched.append(StorageWeakRef(tensor.untyped_storage()))
        return arrived(tensor, mark)

    monkeypatch.setattr(late, "arrived", noted)
    loss = remat(reads, policy=offload(save_names("h")))(X)
    alive.clear()
    monkeypatch.setitem(LOOK, "at", lambda: alive.append([not storage.expired() for storage in fetched]))
    loss.backward(retain_graph=True)
    assert alive == [[False]] and late.take() == ["send 5", "fetch 5", "use 5"]


@pytest.mark.parametrize("again", [1, 2])
def test_a_retained_graph_reads_again_in_the_same_order(late, again):
    ws = weights(*THREE)
    loss = model(X, ws, OFFLOADED)
    expected = torch.autograd.grad(model(X, ws), ws)
    assert late.take() == SENT
    for _ in range(again):
        same(torch.autograd.grad(loss, ws, retain_graph=True), expected, 0.0)
        assert late.take() == READ
        assert late.held() == set(THREE) and late.waiting() == set()
    same(torch.autograd.grad(loss, ws), expected, 0.0)
    assert late.take() == READ and late.held() == set()


def test_a_graph_that_is_dropped_frees_the_host(late):
    loss = model(X, weights(*THREE), OFFLOADED)
    assert late.held() == set(THREE)
    del loss
    assert late.held() == set()


def test_two_partial_backwards(late):
    ws = weights(5, 6, 7, 8)
    first = OFFLOADED(X, ws[0])
    one = OFFLOADED(OFFLOADED(first, ws[1]), ws[2]).sum()
    other = OFFLOADED(first, ws[3]).sum()
    late.take()
    got_other = torch.autograd.grad(other, [ws[0], ws[3]], retain_graph=True)
    # The forward before the last one belongs to the other branch: it was fetched for nothing, and let go of
    # when another region had its turn.
    assert late.take() == ["fetch 8", "fetch 7", "use 8", "fetch 5", "use 5"]
    assert late.waiting() == set() and late.held() == {5, 6, 7, 8}
    got_one = torch.autograd.grad(one, ws[:3])
    assert late.take() == ["fetch 7", "fetch 6", "use 7", "fetch 5", "use 6", "use 5"]
    assert late.waiting() == set()
    first = layer(X, ws[0])
    same(
        got_one, torch.autograd.grad(layer(layer(first, ws[1]), ws[2]).sum(), ws[:3], retain_graph=True), 0.0
    )
    same(got_other, torch.autograd.grad(layer(first, ws[3]).sum(), [ws[0], ws[3]]), 0.0)


def test_a_backward_that_stops_early_lets_go_of_what_it_fetched_ahead(late):
    ws = weights(*THREE)
    loss = model(X, ws, OFFLOADED)
    late.take()
    same(torch.autograd.grad(loss, ws[2:], retain_graph=True), torch.autograd.grad(model(X, ws), ws[2:]), 0.0)
    assert late.take() == ["fetch 7", "fetch 6", "use 7"]
    assert late.waiting() == set() and not transfer._passes


def test_what_has_nothing_left_is_passed_over(late):
    ws, v = weights(5, 6, 7), rand(6, WIDTH, seed=1).requires_grad_()
    first = OFFLOADED(X, ws[0])
    two_products = remat(
        lambda x, w: torch.cos(checkpoint_name(torch.sin(x @ w), "h")) @ v, policy=offload(save_names("h"))
    )
    branch = two_products(X, ws[1]).sum()
    last = OFFLOADED(first, ws[2]).sum()
    # Of the branch one product was gone through, and could be gone through no more: the rest of it stays.
    torch.autograd.grad(branch, v)
    late.take()
    torch.autograd.grad(last, [ws[0], ws[2]])
    assert late.take() == ["fetch 7", "fetch 5", "use 7", "use 5"]


def test_what_had_its_turn_is_not_fetched_ahead_again(late, monkeypatch):
    one, two, three = [transfer.Store({0: transfer.send(torch.zeros(size))}) for size in (1, 2, 3)]
    monkeypatch.setattr(transfer, "graph_task", lambda: 77)
    ends: list[Any] = []
    monkeypatch.setattr(transfer, "at_backward_end", ends.append)
    late.take()
    for store in (two, one, two):
        store.begin(None)
        store.end()
    assert late.take() == ["fetch 2", "fetch 1", "fetch 2"]
    monkeypatch.setattr(transfer, "graph_task", lambda: 78)
    # What runs inside a recomputation fetches nothing of the region around it.
    two.begin(None)
    two.kept[0].get()
    monkeypatch.setattr(transfer, "graph_task", lambda: 79)
    three.begin(None)
    assert late.take() == ["fetch 2", "fetch 1", "use 2", "fetch 3"]
    for store in (three, two):
        store.end()
    for end in ends:
        end()
    assert late.waiting() == set() and not transfer._passes


def test_steps_whose_forwards_both_come_first(late):
    ws = weights(5, 6)
    losses = [model(X, ws, OFFLOADED), model(2 * X, ws, OFFLOADED)]
    late.take()
    for loss, x in zip(losses, (X, 2 * X), strict=True):
        same(torch.autograd.grad(loss, ws), torch.autograd.grad(model(x, ws), ws), 0.0)
        assert late.take() == ["fetch 6", "fetch 5", "use 6", "use 5"]
    assert late.held() == set() and late.waiting() == set()


# -- failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [by_backward, by_grad])
def test_a_failing_forward_leaves_nothing(late, run):
    def fails(x: Tensor, w: Tensor) -> Tensor:
        if w.shape[1] == 6:
            checkpoint_name(torch.sin(x @ w), "h")
            raise ZeroDivisionError
        return layer(x, w)

    ws = weights(*THREE)
    with pytest.raises(ZeroDivisionError):
        run(remat(fails, policy=offload(save_names("h"))), ws)
    assert late.take() == ["send 5", "send 6"]
    assert late.held() == set()
    same(run(OFFLOADED, ws), run(None, ws), 0.0)
    assert late.take() == SENT + READ


def test_a_failing_backward_leaves_nothing_on_the_device(late):
    ws = weights(*THREE)
    fail = [True]

    def check(g: Tensor) -> None:
        if fail[0]:
            raise ZeroDivisionError

    def watched(x: Tensor, w: Tensor) -> Tensor:
        out = OFFLOADED(x, w)
        if w.shape[1] == 6:
            out.register_hook(check)
        return out

    loss = model(X.clone().requires_grad_(), ws, watched)
    late.take()
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(loss, ws, retain_graph=True)
    # The hook stands before the second region, which was fetched ahead.
    assert late.take() == READ[:3]
    assert late.waiting() == set() and not transfer._passes
    fail[0] = False
    same(torch.autograd.grad(loss, ws), torch.autograd.grad(model(X, ws), ws), 0.0)
    assert late.take() == READ
    assert late.held() == set()


def test_a_failing_recomputation_leaves_nothing_on_the_device(late):
    fail = [True]

    def fails(x: Tensor, w: Tensor) -> Tensor:
        out = layer(x, w)
        h = checkpoint_name(torch.tanh(x @ w), "h")
        if is_recomputing() and fail[0] and w.shape[1] == 6:
            raise ZeroDivisionError
        return out + torch.cos(h) @ w.T

    ws = weights(*THREE)
    region = remat(fails, policy=offload(save_names("h")))
    with pytest.raises(ZeroDivisionError):
        by_nested_grad(region, ws)
    assert late.waiting() == set() and not transfer._passes
    fail[0] = False
    same(by_nested_grad(region, ws), by_grad(fails, ws), 0.0)
    assert late.waiting() == set() and late.held() == set()


# -- what is written, and what is looked at -----------------------------------------------------------


def test_what_is_sent_is_what_it_was_before_it_was_written(late):
    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        out = (h.detach() * 2).sin() @ w.T
        h.mul_(3)
        return out + h.square() @ w.T

    (w,) = weights(5)
    region = remat(fn, policy=offload(save_everything))
    same(torch.autograd.grad(region(X, w).sum(), w), torch.autograd.grad(fn(X, w).sum(), w), 0.0)
    assert "send 5" in late.take()


def test_views_of_what_was_written_are_sent_anew(late):
    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        h.mul_(3)
        return torch.sin(h[:, :2]).sum() + torch.cos(h[:, 2:]).sum()

    (w,) = weights(5)
    region = remat(fn, policy=offload(save_everything))
    same(torch.autograd.grad(region(X, w), w), torch.autograd.grad(fn(X, w), w), 0.0)


@pytest.mark.parametrize("look", [lambda t: t, lambda t: t[1:], lambda t: t.view(-1)])
def test_results_may_be_written_to_while_they_are_sent(late, look):
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        return h, torch.sin(checkpoint_name(h, "h"))

    (w,) = weights(5)
    expected = torch.autograd.grad(fn(X, w)[1].sum(), w)
    h, out = remat(fn, policy=offload(save_names("h")))(X, w)
    with torch.no_grad():
        look(h).zero_()
    same(torch.autograd.grad(out.sum(), w), expected, 0.0)
    assert late.take() == ["send 5", "fetch 5", "use 5"]


def test_memory_that_several_values_look_into_is_sent_and_fetched_once(late):
    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        q, k = h[:, :2], h[:, 2:]
        return torch.sin(q).sum() + torch.cos(k.t()).sum() + torch.sin(h.view(-1)).sum()

    (w,) = weights(5)
    region = remat(fn, policy=offload(save_everything))
    same(torch.autograd.grad(region(X, w), w), torch.autograd.grad(fn(X, w), w), 0.0)
    log = late.take()
    assert log.count("send 5") == 1 and log.count("fetch 5") == 1
    # Nor is it listed twice; the sines, which nobody reads, did not stay.
    kept = [r for r in saved_residuals(region, X, w) if r.why == "policy"]
    assert [r.bytes for r in kept] == [3 * 5 * 8]


def test_layouts_come_back(late):
    seen = []

    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = checkpoint_name((x @ w).t(), "h")
        wide = checkpoint_name(torch.sin(h)[:, :1].expand(-1, 4), "wide")
        seen.append((h.stride(), wide.shape))
        return (h.square().sum(0) * wide.exp().sum()).sum()

    (w,) = weights(5)
    region = remat(fn, policy=offload(save_names("h", "wide")))
    same(torch.autograd.grad(region(X, w), w), torch.autograd.grad(fn(X, w), w), 1e-14)
    assert seen[0] == seen[1]


def test_gaps_come_back(late):
    """Sums of what lies otherwise have other last digits."""
    seen: list[Any] = []

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return torch.sin(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            seen.append(ctx.saved_tensors[0].stride())
            return grads[0] * torch.cos(ctx.saved_tensors[0])

    def fn(x: Tensor, w: Tensor) -> Tensor:
        parts = [checkpoint_name(part, "part") for part in (x @ w).chunk(2, -1)]
        return Sine.apply(parts[0]).sum() + Sine.apply(parts[1].mT).sum()

    (w,) = weights(6)
    found = [torch.autograd.grad(f(X, w), w) for f in (fn, remat(fn, policy=offload(save_names("part"))))]
    same(found[0], found[1], 0.0)
    assert seen[:2] == seen[2:]


def test_conjugates_and_negatives_come_back_as_such(late):
    def fn(x: Tensor, w: Tensor) -> Tensor:
        c = torch.complex(x @ w, torch.cos(x @ w))
        return (c @ c.conj().t()).abs().sin().sum()

    (w,) = weights(5)
    expected = torch.autograd.grad(fn(X, w), w)
    same(torch.autograd.grad(remat(fn, policy=offload(save_everything))(X, w), w), expected, 0.0)
    number = torch.complex(X, 2 * X)
    for value in (number, number.conj(), number.conj().imag):
        away = transfer.send(value)
        # Views of what was sent, with and without.
        for root, look in [(None, value), (away, value), (away, value.view(-1)[1:])]:
            got = transfer.send(look, root).get()
            assert torch.equal(got, look) and (got.is_conj(), got.is_neg()) == (look.is_conj(), look.is_neg())
    for value, look in [(number, number.conj()), (number.conj(), number)]:
        away = transfer.send(value)
        late.take()
        assert torch.equal(transfer.send(look, away).get(), look) and late.take() == ["fetch 4", "use 4"]


def test_the_input_of_a_block(late):
    """A value from outside is held on the host alone, if only its name is used inside."""

    def block(x: Tensor, w: Tensor) -> Tensor:
        return layer(checkpoint_name(x, "input"), w)

    region = remat(block, policy=offload(save_names("input")))
    ws = weights(5, 6)
    x = X.clone().requires_grad_()
    values = [x * 1]
    memory = []
    for w in ws:
        values.append(region(values[-1], w))
        late.finish()
        memory.append(StorageWeakRef(values.pop(0).untyped_storage()))
    assert [gone.expired() for gone in memory] == [True, True]
    assert late.take() == ["send 4", "send 4"]
    got = torch.autograd.grad(values[0].square().sum(), [x, *ws])
    assert late.take() == ["fetch 4", "fetch 4", "use 4", "use 4"]
    same(got, torch.autograd.grad(model(x * 1, ws), [x, *ws]), 0.0)
    kept = saved_residuals(region, X.clone().requires_grad_(), ws[0])
    assert [(r.name, r.why) for r in kept if r.shape == (3, 4)] == [("input", "policy")]


@pytest.mark.parametrize("of", [grad, lambda f: vmap(grad(f), (0, None))])
def test_the_input_of_a_block_under_torch_func(late, of):
    region = remat(lambda x, w: layer(checkpoint_name(x, "input"), w), policy=offload(save_names("input")))
    (w,) = weights(5)
    got = of(lambda x, w: region(x, w).square().sum())(X, w.detach())
    same(got, of(lambda x, w: layer(x, w).square().sum())(X, w.detach()), 0.0)
    assert late.take() == ["send 4", "fetch 4", "use 4"]


# -- compositions -------------------------------------------------------------------------------------


def test_nested_regions(late):
    inner = remat(layer, policy=offload(save_names("h")))

    @remat(policy=offload(save_names("outer")))
    def outer(x: Tensor, w: Tensor) -> Tensor:
        return inner(checkpoint_name(torch.sin(inner(x, w)), "outer"), w)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return layer(torch.sin(layer(x, w)), w)

    ws = weights(5, 6)
    for run in (by_backward, by_grad, by_vmap_of_grad):
        same(run(outer, ws), run(plain, ws), 1e-14)
        assert late.waiting() == set() and late.held() == set() and not transfer._passes


def test_second_order(late):
    ws = weights(*THREE)

    def norm(region: Any) -> Callable[[list[Tensor]], Tensor]:
        def of(ws: list[Tensor]) -> Tensor:
            return sum((g.square().sum() for g in grad(lambda ws: model(X, ws, region))(ws)), torch.zeros(()))

        return of

    values = [w.detach() for w in ws]
    same(grad(norm(OFFLOADED))(values), grad(norm(None))(values), 1e-12)
    for region in (OFFLOADED, None):
        first = torch.autograd.grad(model(X, ws, region), ws, create_graph=True)
        second = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), ws)
        if region is not None:
            got = second
    same(got, second, 1e-12)
    first = grad(lambda ws: model(X, ws, OFFLOADED))(values)
    del first
    assert late.waiting() == set() and late.held() == set() and not transfer._passes


def test_with_budgets_and_other_names(late):
    (w,) = weights(5)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = checkpoint_name(x @ w, "h")
        k = checkpoint_name(torch.sin(h), "k")
        return (torch.tanh(k) @ w.T).square().sum()

    expected = torch.autograd.grad(fn(X, w), w)
    budget = checkpoint_policy(budget=1.0)
    for policy, sends, keeps in [
        (offload(save_names("h")) | save_names("k"), 1, 2),
        (offload(save_names("h", "k")) | save_names("k"), 1, 2),
        (offload(save_names("h")) & save_names("h"), 1, 1),
        (offload(save_names("h", "k")), 2, 2),
    ]:
        region = remat(fn, policy=policy)
        same(torch.autograd.grad(region(X, w), w), expected, 0.0)
        log = late.take()
        assert sum(entry.startswith("send") for entry in log) == sends, policy
        kept = [r for r in saved_residuals(region, X, w) if r.why == "policy"]
        assert len(kept) == keeps, policy
        late.take()
    # What a budget chooses to keep, on the host; and what a name asks for beside what a budget chooses.
    for policy in (offload(budget), checkpoint_policy(budget=0.0) | offload(save_names("h"))):
        same(torch.autograd.grad(remat(fn, policy=policy)(X, w), w), expected, 0.0)
        log = late.take()
        assert sum(e.startswith("send") for e in log) == sum(e.startswith("use") for e in log) > 0, policy


def test_what_the_backward_does_not_read_leaves_the_host_with_the_forward(late):
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint_name(x @ w, "h").sum()

    (w,) = weights(5)
    loss = remat(fn, policy=offload(save_names("h")))(X, w)
    assert late.held() == set()
    loss.backward()
    assert late.take() == ["send 5"]


def test_results_that_do_not_all_need_the_same(late):
    def fn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cos(checkpoint_name(x @ w, "a")).sum(), torch.cos(checkpoint_name(x @ v, "b")).sum()

    w, v = weights(5, 6)
    one, other = remat(fn, policy=offload(save_names("a", "b")))(X, w, v)
    late.take()
    same(torch.autograd.grad(one, w, retain_graph=True), torch.autograd.grad(fn(X, w, v)[0], w), 0.0)
    # Of the region itself only what this pass needs comes back.
    assert late.take() == ["fetch 5", "use 5"]
    same(torch.autograd.grad(other, v), torch.autograd.grad(fn(X, w, v)[1], v), 0.0)
    assert late.take() == ["fetch 6", "use 6"] and late.waiting() == set()


# -- streams ------------------------------------------------------------------------------------------


class Streams:
    """Stands for torch where there is no accelerator: writes down what streams are told."""

    Tensor, strided, nn = Tensor, torch.strided, torch.nn

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "computing"
        self.accelerator = self

    def current_accelerator(self) -> torch.device:
        return torch.device("cpu")

    def current_stream(self, device: torch.device) -> Any:
        return self.Stream(device, self.now)

    def Stream(self, device: torch.device, name: str = "side") -> Any:  # noqa: N802
        return Stream(self, device, name)

    def empty_like(self, tensor: Tensor, device: Any, pin_memory: bool = False) -> Tensor:
        self.log.append(f"new {'pinned' if pin_memory else 'on ' + str(device)}")
        return torch.full_like(tensor, torch.nan)


class Stream:
    def __init__(self, torch: Streams, device: torch.device, name: str) -> None:
        self.torch, self.device, self.name = torch, device, name

    def __enter__(self) -> None:
        self.before, self.torch.now = self.torch.now, self.name

    def __exit__(self, *_: Any) -> None:
        self.torch.now = self.before

    def wait_stream(self, other: Stream) -> None:
        self.torch.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.torch.log.append(f"{self.name} marks")
        return "mark"

    def wait_event(self, event: str) -> None:
        self.torch.log.append(f"{self.name} waits for {event}")


def test_what_streams_are_told(monkeypatch):
    streams = Streams()
    copy = Tensor.copy_
    monkeypatch.setattr(transfer, "torch", streams)
    monkeypatch.setattr(transfer, "_lanes", {})

    def copied(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        streams.log.append(f"{streams.now} copies{'' if non_blocking else ' and blocks'}")
        return copy(to, source)

    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(Tensor, "record_stream", lambda t, s: streams.log.append(f"memory used by {s.name}"))
    value = torch.ones(3)
    away = transfer.send(value)
    copying = ["side waits for computing", "side copies", "side marks", "memory used by side"]
    assert streams.log == ["new pinned", *copying]
    streams.log.clear()
    away.parcel.fetch(1)
    # The memory is the computing stream's own: no copy into it before what it served until now is over.
    assert streams.log == ["new on cpu", *copying]
    streams.log.clear()
    assert torch.equal(away.get(), value)
    assert streams.log == ["computing waits for mark", "memory used by computing"]
    streams.log.clear()
    away.parcel.wait()
    assert streams.log == ["computing waits for mark"]
    assert transfer.lane(value) is transfer.lane(value)
    assert not isinstance(transfer.lane(torch.empty(3, device="meta")), transfer.StreamLane)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_the_side_stream_may_lag_behind():
    """What is written to or let go of right away is sent as it was, however late the copy begins."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    lane = transfer.StreamLane(torch.device(device.type, torch.accelerator.current_device_index()))
    a = rand(2048, 2048).to(lane.stream.device)
    for i in range(50):
        value = (a @ a).div_(i + 1)
        expected = value.clone()
        host, mark = lane.send(value)
        if i % 2:
            lane.wait(mark)
            value.zero_()
        del value
        torch.empty_like(a).fill_(torch.nan)
        back, mark = lane.fetch(host, torch.empty_like(a))
        same(lane.arrived(back, mark), expected, 0.0)
