"""What a scan computes, how often it evaluates its body, and what it refuses."""

from __future__ import annotations

import doctest
import gc
import sys
import weakref
from itertools import starmap
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from remat import RematError, scan_layers, scan_remat, stack_params, unstack_params, while_remat
from remat.schedules import Online, Revolve, Segmented, Sqrt, advances
from tests.helpers import crossed, sparse
from tests.inside import trace_memory
from tests.scan.inside import Advance, default_slots


class Counted:
    """`tanh(w h)`, counting its evaluations."""

    def __init__(self) -> None:
        self.calls = 0
        self.w = torch.tensor(0.9, requires_grad=True)

    def __call__(self, h, x):
        self.calls += 1
        return torch.tanh(self.w * h), None


@pytest.mark.parametrize("c", [1, 2, 3, 5, 12])
def test_body_evaluations_equal_the_formula(c):
    for n in (1, 2, 3, 8, 21, 55, 130):
        body = Counted()
        last, _ = scan_remat(body, torch.ones(()), length=n, checkpoints=c)
        assert body.calls == n
        last.backward()
        # n in the forward; the advances that t(n + 1, c) counts beyond these; every step once with its tape.
        assert body.calls == n + (advances(n + 1, c) - n) + n


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40))
def test_body_evaluations_at_random(n, c):
    body = Counted()
    scan_remat(body, torch.ones(()), length=n, checkpoints=c)[0].backward()
    assert body.calls == n + advances(n + 1, c)


@pytest.mark.parametrize("schedule", [Sqrt(), Segmented(4), Segmented(3, Revolve(2))], ids=repr)
def test_other_schedules_evaluate_what_they_say(schedule):
    body = Counted()
    scan_remat(body, torch.ones(()), length=37, checkpoints=schedule)[0].backward()
    assert body.calls == schedule.stats(37).evaluations


@pytest.mark.parametrize("transform", ["grad", "vmap grad"])
def test_body_evaluations_under_functorch(transform):
    body = Counted()

    def f(h):
        return scan_remat(body, h, length=30, checkpoints=4)[0]

    if transform == "grad":
        torch.func.grad(f)(torch.ones(()))
    else:
        torch.func.vmap(torch.func.grad(f))(torch.ones(5))
    assert body.calls == Revolve(4).stats(30).evaluations


@pytest.mark.parametrize("n, c", [(1, 1), (7, 3), (15, 4), (40, 4), (64, 3)])
def test_while_evaluates_as_its_schedule_says(n, c):
    body = Counted()
    end = while_remat(
        lambda s: s[0] < n, lambda s: (s[0] + 1, body(s[1], None)[0]), (0, torch.ones(())), checkpoints=c
    )
    assert end[0] == n and body.calls == n
    end[1].backward()
    assert body.calls == Online(c).stats(n).evaluations


def kept_bytes(n: int, checkpoints: Any) -> int:
    """Bytes of distinct storages that stay alive between forward and backward, the result not counted."""
    made: list[weakref.ref[torch.Tensor]] = []

    def body(h, _):
        h = torch.tanh(h)
        made.append(weakref.ref(h))
        return h, None

    last, _ = scan_remat(body, torch.ones(256, requires_grad=True), length=n, checkpoints=checkpoints)
    gc.collect()
    return sum(h.nbytes for h in (r() for r in made) if h is not None and h is not last)


@pytest.mark.parametrize(
    ("checkpoints", "carries"),
    sparse(starmap(pytest.param, [(4, 4), (1, 1), (8, 8), ("all", 39), ("sqrt", 11)])),
)
def test_between_passes_no_more_carries_live_than_slots(checkpoints, carries):
    # One slot holds the initial carry, which the body did not make; one more carry is in hand.
    assert kept_bytes(40, checkpoints) <= carries * 1024


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_peak_under_functorch(order):
    w, h = torch.randn(32, 32) / 6, torch.zeros(32, 32)

    def body(w):
        return lambda h, _: (torch.tanh(h @ w) + h.sin(), None)

    def loop(w):
        state = h
        for _ in range(100):
            state, _ = body(w)(state, None)
        return state.sum()

    def ours(w):
        return scan_remat(body(w), h, length=100, checkpoints=4)[0].sum()

    def peak(f):
        g = torch.func.grad(f)
        if order == 2:
            g = torch.func.grad(lambda w, g=g: g(w).sum())
        return trace_memory(lambda mark: g(w)).peak

    # Second order lists all states once, so it keeps a carry a step; the loop keeps several tapes.
    assert peak(ours) < peak(loop) / (20 if order == 1 else 4)


def test_carries_of_every_kind():
    w = torch.randn(3, 3, requires_grad=True)

    def body(c, x):
        h = torch.sin(c["h"] @ w) * (2 if c["flag"] else 1) + c["i"] + x
        return {"h": h, "i": c["i"] + 1, "flag": not c["flag"], "none": None, "n": c["n"] + 1}, {
            "y": h,
            "no": None,
        }

    def start():
        return {"h": torch.ones(3), "i": 0, "flag": True, "none": None, "n": torch.tensor(5)}

    xs = torch.randn(6, 3)
    carry, ys = start(), []
    for x in xs:
        carry, y = body(carry, x)
        ys.append(y["y"])
    expected = torch.autograd.grad(carry["h"].sum() + torch.stack(ys).pow(2).sum(), w)
    for checkpoints in ("all", "sqrt", 1, 2):
        ours, stacked = scan_remat(body, start(), xs, checkpoints=checkpoints)
        assert (ours["i"], ours["flag"], ours["none"], int(ours["n"])) == (6, True, None, 11)
        assert stacked["no"] is None
        found = torch.autograd.grad(ours["h"].sum() + stacked["y"].pow(2).sum(), w)
        torch.testing.assert_close(found, expected)


def test_no_steps_and_no_xs():
    init = torch.ones(3, requires_grad=True)
    end, ys = scan_remat(lambda h, x: (h + x, {"y": torch.outer(h, x)}), init, torch.zeros(0, 3))
    assert end is init and ys["y"].shape == (0, 3, 3)
    assert scan_remat(lambda h, x: (h, x), init, length=0)[1] is None
    end, ys = scan_remat(lambda h, x: (h * 2, x), init, length=3)
    assert ys is None and torch.equal(end, 8 * init)
    end, _ = scan_remat(lambda h, x: (h + x["a"], None), init, {"a": torch.ones(2, 3), "b": None})
    assert torch.equal(end, init + 2)


@pytest.mark.parametrize("checkpoints", ["all", "sqrt", 1, 3, Segmented(2, Revolve(2))], ids=repr)
def test_random_numbers_are_the_same_again(checkpoints):
    h, xs = torch.randn(4, requires_grad=True), torch.randn(9, 4)

    def body(h, x):
        return torch.nn.functional.dropout(torch.tanh(h + x)) + torch.rand(4) * h, None

    torch.manual_seed(1)
    expected, after = h, None
    for x in xs:
        expected, _ = body(expected, x)
    after = torch.rand(1)
    torch.manual_seed(1)
    ours, _ = scan_remat(body, h, xs, checkpoints=checkpoints)
    assert torch.equal(ours, expected) and torch.equal(torch.rand(1), after)
    state = torch.get_rng_state()
    found = torch.autograd.grad(ours.sum(), h)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), h))


def test_autocast_of_the_forward_holds_in_the_backward():
    w = torch.randn(8, 8, requires_grad=True)
    seen = []

    def body(h, _):
        h = torch.tanh(h @ w)
        seen.append(h.dtype)
        return h, None

    with torch.autocast("cpu", dtype=torch.bfloat16):
        end, _ = scan_remat(body, torch.zeros(8, dtype=torch.bfloat16), length=5, checkpoints=1)
    end.sum().backward()
    assert set(seen) == {torch.bfloat16} and len(seen) == Revolve(1).stats(5).evaluations


def test_auto_keeps_within_its_budget():
    body = Counted()
    scan_remat(body, torch.ones(100), length=50, checkpoints="auto", budget="4KiB")[0].sum().backward()
    many = body.calls
    body.calls = 0
    scan_remat(body, torch.ones(100), length=50, checkpoints="auto", budget=10**6)[0].sum().backward()
    # And the one that measures: what a step counts, it counts then, too.
    assert body.calls == 2 * 50 + 1 < many


def test_progress():
    events = []
    h = torch.ones((), requires_grad=True)
    end, _ = scan_remat(
        lambda h, _: (h.sin(), None), h, length=4, checkpoints=1, on_step=lambda *event: events.append(event)
    )
    assert events == [("forward", k) for k in range(4)]
    end.backward()
    assert [k for phase, k in events if phase == "reverse"] == [3, 2, 1, 0]
    assert len([1 for phase, _ in events if phase == "advance"]) == 3 + 2 + 1


class Holder:
    w = torch.tensor(2.0, requires_grad=True)


def test_a_captured_tensor_that_changes_is_found_out_under_functorch():
    holder = Holder()

    def f(w):
        holder.w = w
        out = scan_remat(lambda h, _: (h * holder.w, None), torch.ones(()), length=3, checkpoints=1)[0]
        holder.w = Holder.w
        return out

    with pytest.raises(RematError, match="did not read in the forward"):
        torch.func.grad(f)(torch.tensor(3.0))


# -- loops and layers --------------------------------------------------------------------------------------


def root(a):
    return while_remat(lambda x: (x * x - a).abs() > 1e-9, lambda x: (x + a / x) / 2, a, checkpoints=2)


def test_while():
    a = torch.tensor([2.0, 100.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(root)(a), a.sqrt())
    slope = torch.func.grad(root)
    torch.testing.assert_close(slope(a[0]), 0.5 / a[0].sqrt())
    torch.testing.assert_close(torch.func.vmap(slope)(a), 0.5 / a.sqrt())
    torch.testing.assert_close(torch.func.grad(slope)(a[0]), -0.25 * a[0] ** -1.5)
    torch.testing.assert_close(torch.func.jvp(root, (a[0],), (a[1],))[1], a[1] * 0.5 / a[0].sqrt())
    capped = while_remat(lambda x: True, lambda x: x * 2, a, max_steps=3)
    assert torch.equal(capped, 8 * a)
    assert torch.equal(while_remat(lambda x: False, lambda x: x * 2, a, checkpoints=2), a)


@pytest.mark.parametrize(("steps", "checkpoints"), crossed([0, 1, 4, 5, 9], [1, 2, None]))
def test_a_loop_that_ends_before_or_at_its_most_steps(steps, checkpoints):
    w = torch.randn(4, dtype=torch.float64)
    options: dict[str, Any] = (
        {"max_steps": 5} if checkpoints is None else {"max_steps": 5, "checkpoints": checkpoints}
    )

    def loop(w):
        body = lambda c: (torch.sin(c[0] + w), c[1] + 1)  # noqa: E731
        return while_remat(lambda c: c[1] < steps, body, (w * 2, torch.tensor(0)), **options)[0].sum()

    def looped(w):
        h = w * 2
        for _ in range(min(steps, 5)):
            h = torch.sin(h + w)
        return h.sum()

    leaf = w.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(loop(leaf), leaf)[0], torch.func.grad(looped)(w))
    torch.testing.assert_close(torch.func.grad(loop)(w), torch.func.grad(looped)(w))
    batch = torch.stack([w, -w])
    found = torch.func.vmap(torch.func.grad(loop))(batch)
    torch.testing.assert_close(found, torch.func.vmap(torch.func.grad(looped))(batch))


def advancing(c: int, n: int) -> list[Advance]:
    actions = Online(c).actions(n, Online(c).forward(n))
    return [action for action in actions if isinstance(action, Advance)]


def test_default_slots_recompute_no_step_twice():
    for n in (*range(1, 50), 99, 100, 120, 199):
        c = default_slots(n)
        runs = [sum(a.start <= k < a.stop for a in advancing(c, n)) for k in range(n)]
        assert max(runs) <= 1 and (c == 1 or c * (c + 1) // 2 <= n)


def test_stacking_there_and_back():
    blocks = torch.nn.ModuleList(torch.nn.BatchNorm1d(4) for _ in range(3))
    others = torch.nn.ModuleList(torch.nn.BatchNorm1d(4) for _ in range(3))
    for weight in blocks.parameters():
        torch.nn.init.normal_(weight)
    stacked = stack_params(blocks)
    assert set(stacked) == set(blocks[0].state_dict())
    unstack_params(stacked, others)
    for a, b in zip(blocks.state_dict().values(), others.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="module 1.*bias"):
        stack_params([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)])
    with pytest.raises(ValueError, match=r"\(3, 2\).*module 1.*\(2, 2\)"):
        stack_params([torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)])
    with pytest.raises(ValueError, match="3 layers of parameters and 2 modules"):
        unstack_params(stacked, list(others)[:2])


class Tied(torch.nn.Module):
    """A parameter under two names, and a buffer that its state dict does not hold."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.rand(3), persistent=False)

    def forward(self, x):
        return torch.tanh(self.b(self.a(x))) * self.scale


def test_stacking_tied_parameters_and_unsaved_buffers():
    blocks, others = ([Tied() for _ in range(2)] for _ in range(2))
    stacked, x = stack_params(blocks), torch.randn(2, 3)
    expected = blocks[1](blocks[0](x))
    torch.testing.assert_close(scan_layers(blocks[0], stacked, x), expected)
    unstack_params(stacked, others)
    torch.testing.assert_close(others[1](others[0](x)), expected)
    with pytest.raises(ValueError, match="shapes differ.*weight"):
        unstack_params(stacked, [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])


def test_documented_examples_run():
    for public in (scan_remat, while_remat, scan_layers):
        result = doctest.testmod(sys.modules[public.__module__], optionflags=doctest.NORMALIZE_WHITESPACE)
        assert result.attempted and not result.failed


# -- compilation -------------------------------------------------------------------------------------------
