"""Carries and tapes of scans in host memory: each is fetched while the steps before it are run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from remat import scan_remat
from remat.schedules import Revolve
from tests.helpers import rand, same
from tests.lanes import Late
from tests.scan.inside import Restore, Reverse, Store, with_notice

N = 9


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    return Late.installed(monkeypatch)


def operands() -> list[Tensor]:
    return [rand(4, seed=1).requires_grad_(), rand(4, 4, seed=2).requires_grad_()]


def end(x: Tensor, w: Tensor, **options: Any) -> Tensor:
    return scan_remat(lambda h, _: (torch.sin(h @ w) + h, None), x, length=N, **options)[0].sum()


@pytest.mark.parametrize("checkpoints", [3, N, Revolve(2)], ids=str)
def test_the_carry_before_is_fetched_while_steps_are_pulled_back_through(late, checkpoints):
    leaves = operands()
    expected = torch.autograd.grad(end(*leaves, checkpoints=checkpoints), leaves)

    def noted(what: str, step: int) -> None:
        if what == "reverse":
            late.log.append(what)

    loss = end(*leaves, checkpoints=checkpoints, offload=True, on_step=noted)
    assert len(late.take()) > 0
    same(torch.autograd.grad(loss, leaves), expected, 0.0)
    log = late.take()
    assert log.count("fetch 4") == log.count("use 4") > 0
    # Wherever a carry is used, but for the first, it was asked for before the last step was pulled back.
    for at, entry in enumerate(log):
        if entry == "use 4" and "use 4" in log[:at]:
            before = [e for e in log[:at] if e != "send 4"]
            assert before[-2:] == ["fetch 4", "reverse"], log
    assert late.most == 1 and late.held() == set() and late.waiting() == set()


def test_under_torch_func(late):
    x, w = (t.detach() for t in operands())

    def loss(w: Tensor, **options: Any) -> Tensor:
        return end(x, w, checkpoints=3, **options)

    for of in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f), randomness="error")):
        at = w if of is torch.func.grad else torch.stack([w, 2 * w])
        same(of(lambda w: loss(w, offload=True))(at), of(loss)(at), 0.0)
        assert "fetch 4" in late.take()
    assert late.held() == set() and late.waiting() == set()


def test_the_graph_is_kept_and_read_again(late):
    leaves = operands()
    expected = torch.autograd.grad(end(*leaves, checkpoints=3), leaves)
    loss = end(*leaves, checkpoints=3, offload=True)
    for retain in (True, True, False):
        same(torch.autograd.grad(loss, leaves, retain_graph=retain), expected, 0.0)
    assert late.held() == set()


def test_results_may_be_written_to_while_they_are_sent(late):
    """A carry that was sent may be a result, too: two steps later, in another place."""
    x, w = operands()

    def body(carry: Any, _: None) -> Any:
        a, b, c = carry
        return (torch.sin(a @ w), a, b), None

    def run(**options: Any) -> tuple[Tensor, ...]:
        return scan_remat(body, (x, x * 2, x * 3), length=N, checkpoints=N, **options)[0]

    expected = torch.autograd.grad(run()[0].sum(), [x, w])
    a, _, c = run(offload=True)
    with torch.no_grad():
        c.zero_()
    same(torch.autograd.grad(a.sum(), [x, w]), expected, 0.0)


def test_a_slot_is_announced_when_it_holds_its_state():
    first, second = Restore(4, 1), Restore(6, 0)
    actions = [Reverse(8, 9), first, Store(4, 2), Store(6, 0), Reverse(7, 8), second, Reverse(6, 7)]
    said: list[Any] = []
    for action in with_notice(actions, said.append):
        said.append(action)
    assert said == [1, *actions[:4], 0, *actions[4:]]
    assert list(with_notice([], said.append)) == []
