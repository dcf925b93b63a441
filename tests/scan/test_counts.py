"""How many ops a scan runs again, how many tensors live, and what an observer is told."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from remat import remat, saved_residuals, scan_remat, while_remat
from remat.policies import save_everything
from remat.schedules import Multilevel, Online, Revolve, Sqrt, advances
from tests.helpers import OpCounter, crossed, sparse
from tests.scan.inside import Store, spec, to_host

STEPS = 4


def backward_ops(value: torch.Tensor, targets: Any) -> Counter[str]:
    with OpCounter() as ops:
        torch.autograd.grad(value, targets)
    return ops.counts


def three_sines(w):
    def body(h, _):
        for _ in range(3):
            h = torch.sin(h @ w)
        return h, None

    return body


def test_without_a_policy_nothing_inside_a_step_is_saved():
    w = torch.eye(5).requires_grad_()
    end, _ = scan_remat(three_sines(w), torch.ones(1, 5), length=STEPS, checkpoints="all")
    ops = backward_ops(end.sum(), w)
    assert (ops["sin"], ops["cos"]) == (3 * STEPS, 3 * STEPS)


def test_everything_saved_runs_nothing_again():
    w = torch.eye(5).requires_grad_()
    options = {"checkpoints": "all", "policy": save_everything}
    end, _ = scan_remat(three_sines(w), torch.ones(1, 5), length=STEPS, **options)
    assert backward_ops(end.sum(), w)["sin"] == 0


@pytest.mark.parametrize("checkpoints", [1, 2, "sqrt", "all"])
def test_remat_outside_runs_the_scan_once_more_and_then_by_its_schedule(checkpoints):
    h = torch.ones(3, requires_grad=True)
    n = 9

    def f(h):
        return scan_remat(lambda h, _: (h.sin(), None), h, length=n, checkpoints=checkpoints)[0].sum()

    inside = backward_ops(f(h), h)["sin"]
    # The region evaluates the scan's forward again, once, up to the last carry that the scan keeps; what the
    # scan itself recomputes stays the same. One carry is the region's argument.
    again = backward_ops(remat(f)(h), h)["sin"] - inside
    assert again == 0 if checkpoints == 1 else 0 < again < n


def test_remat_inside_evaluates_each_step_as_the_schedule_says():
    h, n = torch.ones(3, requires_grad=True), 9
    plain = backward_ops(scan_remat(lambda h, _: (h.sin(), None), h, length=n, checkpoints=2)[0].sum(), h)
    ours = backward_ops(
        scan_remat(remat(lambda h, _: (h.sin(), None)), h, length=n, checkpoints=2)[0].sum(), h
    )
    assert plain["sin"] == Revolve(2).stats(n).evaluations - n
    # One sine a step has no sine to run again for its derivative: a region around it costs none.
    assert ours["sin"] == plain["sin"] and ours["cos"] == plain["cos"] == n


def live(run: Any) -> int:
    """The most tensors made by a body that are alive at one time, forward and backward."""
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    def body(h, *_):
        nonlocal most
        h = torch.tanh(h)
        made.add(h)
        most = max(most, len(made))
        return h

    gc.collect()
    run(body).sum().backward()
    return most


@pytest.mark.slow
@pytest.mark.parametrize("slots", sparse([2, 8], 2))
def test_tensors_alive_do_not_depend_on_the_length(slots):
    def run(n):
        h = torch.ones(4, requires_grad=True)
        return live(lambda body: scan_remat(lambda h, _: (body(h), None), h, length=n, checkpoints=slots)[0])

    # The slots, the state in hand, the one being made, and what the tape of one step holds.
    assert run(2000) == run(200) <= slots + 3


@pytest.mark.parametrize(("slots", "kind"), crossed([1, 2, 5, 8], ["scan", "loop"]))
def test_exactly_so_many_carries_are_kept_and_steps_run_again(kind, slots):
    n, steps = 19, Counter()
    made: weakref.WeakSet[Any] = weakref.WeakSet()

    def body(h, _=None):
        h = torch.tanh(h)
        made.add(h)
        return h, None

    note = lambda phase, _: steps.update([phase])  # noqa: E731
    h = torch.ones(3, requires_grad=True)
    if kind == "loop":
        run = lambda c: (c[0] + 1, body(c[1])[0])  # noqa: E731
        end = while_remat(lambda c: c[0] < n, run, (0, h), checkpoints=slots, on_step=note)[1]
    else:
        end, _ = scan_remat(body, h, length=n, checkpoints=slots, on_step=note)
    gc.collect()
    # The first carry is the argument; the last one is the result and nobody's checkpoint.
    assert len(made) == slots - 1 + 1
    end.sum().backward()
    schedule = Online(slots) if kind == "loop" else Revolve(slots)
    recomputed = schedule.stats(n).recomputed
    if kind == "scan" or n < (slots + 1) * (slots + 2) // 2:
        assert recomputed == advances(n + 1, slots) - n
    assert steps == {"forward": n, "advance": recomputed, "reverse": n}


def test_tensors_alive_of_a_loop_do_not_depend_on_the_length():
    def run(n):
        start = (0, torch.ones(4, requires_grad=True))

        def go(body):
            return while_remat(lambda c: c[0] < n, lambda c: (c[0] + 1, body(c[1])), start, checkpoints=8)[1]

        return live(go)

    assert run(1000) == run(200) <= 8 + 3


@pytest.mark.parametrize("checkpoints, carries", [("all", 7), (1, 0), (3, 2), ("sqrt", 3)])
def test_saved_residuals_shows_what_a_scan_keeps(checkpoints, carries):
    w = torch.randn(3, 3, requires_grad=True)

    def f(h, xs):
        def body(h, x):
            return torch.tanh(h @ w + x), h.sin()

        return scan_remat(body, h, xs, checkpoints=checkpoints)[0].sum()

    h, xs = torch.zeros(3, requires_grad=True), torch.randn(8, 3)
    found = saved_residuals(f, h, xs)
    inputs = {(r.why, r.shape) for r in found if r.why != "policy"}
    assert inputs == {("argument", (3,)), ("argument", (8, 3)), ("captured", (3, 3))}
    kept = [r for r in found if r.why == "policy"]
    # The first carry is the argument and not counted.
    assert len(kept) == carries
    assert all(r.shape == (3,) and "tanh" in str(r.op) for r in kept)


def test_a_scan_without_gradient_reports_nothing():
    w = torch.randn(3, requires_grad=True)

    def f(h):
        with torch.no_grad():
            end, _ = scan_remat(lambda h, _: (torch.tanh(h * w), None), h, length=5, checkpoints=2)
        return h * end

    assert all(r.why != "policy" for r in saved_residuals(f, torch.ones(3, requires_grad=True)))


@pytest.mark.parametrize("schedule", [Multilevel(device=1, host=2), Multilevel(device=0, host=3), Sqrt(3)])
def test_multilevel_counts_as_one_level(schedule):
    h, n = torch.ones(3, requires_grad=True), 20
    ops = backward_ops(
        scan_remat(lambda h, _: (h.sin(), None), h, length=n, checkpoints=schedule)[0].sum(), h
    )
    assert ops["sin"] == schedule.stats(n).evaluations - n


@pytest.mark.parametrize(
    "options", [{"checkpoints": Multilevel(device=1, host=2)}, {"offload": True}], ids=str
)
def test_which_carries_go_to_the_host(options, monkeypatch):
    sent = []
    monkeypatch.setattr(spec, "to_host", lambda t: sent.append(t) or to_host(t))
    h, n = torch.ones(3, requires_grad=True), 20
    schedule = options.get("checkpoints", Revolve(3))
    end, _ = scan_remat(lambda h, _: (h.sin(), None), h, length=n, **{"checkpoints": 3, **options})
    offloaded = getattr(schedule, "offloaded", lambda slot: True)
    stored = schedule.forward(n)
    # The first carry is an operand and stays where it is.
    assert len(sent) == sum(offloaded(slot) for step, slot in stored.items() if step)
    found = torch.autograd.grad(end.sum(), h)[0]
    again = [a.slot for a in schedule.actions(n, stored) if isinstance(a, Store)]
    assert len(sent) == sum(map(offloaded, [*(s for k, s in stored.items() if k), *again]))
    expected = h
    for _ in range(n):
        expected = expected.sin()
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), h)[0])
