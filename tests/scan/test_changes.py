"""What a scan's step reads beside its operands, and what happens if it changes before the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from remat import RematError, remat, save_matmuls, scan_remat
from tests.helpers import crossed
from tests.scan.inside import fingerprints_of


class Holder:
    factor: Any = 2.0

    def other(self) -> None:
        self.factor = self.factor + 1


def run(body: Callable[..., Any], x: torch.Tensor, **options: Any) -> torch.Tensor:
    return scan_remat(body, x * 1, length=5, **options)[0]


def start() -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.double).view(3, 4).requires_grad_()


OTHER = "gave other numbers when the backward evaluated it again"
CHANGES = {
    "a number": (2.0, lambda held: setattr(held, "factor", 2.01)),
    "a tensor put in its place": (
        torch.full((4,), 2.0),
        Holder.other,
    ),
    "a write to a tensor": (torch.full((4,), 2.0), lambda held: held.factor.mul_(1.1)),
    "a sign": (2.0, lambda held: setattr(held, "factor", -2.0)),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"checkpoints": 1},
    {"checkpoints": 3},
    {"checkpoints": "all"},
    {"checkpoints": "sqrt", "policy": save_matmuls},
]


@pytest.mark.parametrize(("change", "options"), crossed(CHANGES, OPTIONS))
def test_a_change_before_the_backward_is_an_error(change: str, options: dict[str, Any]) -> None:
    held, x = Holder(), start()
    held.factor, happens = CHANGES[change][0], CHANGES[change][1]
    if isinstance(held.factor, torch.Tensor):
        held.factor = held.factor.double()
    out = run(lambda h, _: ((h * held.factor).sin(), None), x, **options)
    happens(held)
    with pytest.raises(RematError, match=OTHER):
        out.sum().backward()


def test_where_the_policy_records_steps_the_forward_counts() -> None:
    held, x = Holder(), start()
    out = run(lambda h, _: ((h * held.factor).sin(), None), x, checkpoints="all", policy=save_matmuls)
    expected = x * 1
    for _ in range(5):
        expected = (expected * held.factor).sin()
    held.factor = 3.0
    (found,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), x)[0])


def test_a_change_for_a_step_in_the_middle() -> None:
    factors, x = [2.0, 3.0, 4.0, 5.0, 6.0], start()
    out, _ = scan_remat(lambda h, k: ((h * factors[int(k)]).sin(), None), x * 1, torch.arange(5))
    factors[2] = 7.0
    with pytest.raises(RematError, match=f"step 2 or one before it {OTHER}"):
        out.sum().backward()


def test_a_counter_in_the_body() -> None:
    calls, x = [0], start()

    def body(h: torch.Tensor, _: None) -> tuple[torch.Tensor, None]:
        calls[0] += 1
        return (h * calls[0]).sin(), None

    with pytest.raises(RematError, match=OTHER):
        run(body, x).sum().backward()


def test_a_change_that_only_ys_show() -> None:
    held, x = Holder(), start()
    _, ys = scan_remat(lambda h, _: (h.sin(), h * held.factor), x * 1, length=4)
    held.factor = 3.0
    with pytest.raises(RematError, match=OTHER):
        ys.sum().backward()


def test_a_change_before_the_second_derivative() -> None:
    held, x = Holder(), start()
    out = run(lambda h, _: ((h * held.factor).sin(), None), x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    held.factor = 3.0
    with pytest.raises(RematError, match=OTHER):
        grad.sum().backward()


@pytest.mark.parametrize("wrap", [lambda f: f, torch.vmap], ids=["vjp", "vjp of vmap"])
def test_a_change_before_a_pull_back_of_torch_func(wrap: Any) -> None:
    held = Holder()
    f = wrap(lambda x: run(lambda h, _: ((h * held.factor).sin(), None), x))
    out, pull, *_ = torch.func.vjp(f, start().detach())
    held.factor = 3.0
    with pytest.raises(RematError, match=OTHER):
        pull(torch.ones_like(out))


def test_a_change_inside_a_region() -> None:
    held, x = Holder(), start()
    region = remat(lambda x: run(lambda h, _: ((h * held.factor).sin(), None), x).sin())
    region(x).sum().backward()
    out = region(x)
    held.factor = 3.0
    with pytest.raises(RematError, match=OTHER):
        out.sum().backward()


@pytest.mark.parametrize("read", [False, True])
def test_a_recomputation_around_that_leaves_ops_out_is_no_change(read: bool) -> None:
    """Where nobody reads the scan's result, what stands in for it has other numbers."""

    def loss(x: torch.Tensor, wrap: Callable[..., Any]) -> torch.Tensor:
        def block(x: torch.Tensor) -> torch.Tensor:
            end = run(lambda h, _: (h.sin() * 2, None), x, checkpoints=1)
            return wrap(lambda end, x: x.cos() + (end if read else 0))(end, x)

        return wrap(block)(x).sum()

    x = start().detach()
    expected = torch.func.grad(lambda x: loss(x, lambda fn: fn))(x)
    torch.testing.assert_close(torch.func.grad(lambda x: loss(x, remat))(x), expected)


def test_numbers_that_are_not_finite_are_no_change() -> None:
    x = start()
    out = run(lambda h, _: (h / 0.0, None), x)
    out.sum().backward()
    assert x.grad is not None


def test_states_without_elements() -> None:
    x = torch.zeros(3, 0, requires_grad=True)
    run(lambda h, _: (h.sin(), h), x).sum().backward()
    assert x.grad is not None and x.grad.shape == (3, 0)


def test_inference_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "vector_norm", None)
    with torch.no_grad():
        run(lambda h, _: (h.sin(), None), start())
    run(lambda h, _: (h.sin(), None), start().detach())


def test_zeros_that_take_no_memory_are_compared() -> None:
    """Derivatives of derivatives hand them to steps, and `tolist` refuses them."""
    zeros, ones = (value.expand(3, 4) for value in (torch.zeros(()), torch.ones(())))
    nothing = torch._efficientzerotensor((3, 4))  # pyright: ignore[reportPrivateImportUsage]
    (found,), (same,), (other,) = map(fingerprints_of, ([nothing], [zeros], [ones]))
    assert found.read() == same.read() != other.read()
