"""Functions that go backward inside their own backward, in steps of scans: chunked MLPs, reversible pairs and
the checkpoint functions of Megatron, DeepSpeed and others accumulate the gradients of weights there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import RematError, remat, save_matmuls, save_nothing, scan_layers, scan_remat, while_remat
from tests.bank.library import Accumulates
from tests.helpers import crossed

Step = Callable[[Tensor], Tensor]
STEPS = 3


def whole(fn: Step, x: Tensor) -> Tensor:
    return Accumulates.apply(fn, x)  # pyright: ignore


def in_chunks(fn: Step, x: Tensor) -> Tensor:
    return torch.cat([Accumulates.apply(fn, part) for part in x.chunk(2)])  # pyright: ignore


def beside(fn: Step, x: Tensor) -> Tensor:
    return whole(fn, x) + 0.5 * fn(x)


def nested(fn: Step, x: Tensor) -> Tensor:
    return whole(lambda x: whole(fn, x).sin(), x)


def scanned(step: Step, x: Tensor) -> Tensor:
    return scan_remat(lambda h, _: (step(h), None), x, None, length=STEPS, checkpoints=1)[0]


def until(step: Step, x: Tensor) -> Tensor:
    body = lambda c: (step(c[0]), c[1] + 1)  # noqa: E731
    return while_remat(lambda c: c[1] < STEPS, body, (x, torch.tensor(0)), checkpoints=2, max_steps=5)[0]


def in_a_region(step: Step, x: Tensor) -> Tensor:
    return remat(lambda x: scanned(step, x), policy=save_nothing)(x)


def in_a_region_that_saves(step: Step, x: Tensor) -> Tensor:
    return remat(lambda x: until(step, x), policy=save_matmuls)(x)


def regions_all_around(step: Step, x: Tensor) -> Tensor:
    return remat(remat(lambda x: scanned(remat(step), x)))(x)


def in_a_loop_in_a_scan(step: Step, x: Tensor) -> Tensor:
    return scan_remat(lambda h, _: (until(step, h) * 0.5, None), x, None, length=2, checkpoints=1)[0]


PLAIN = {in_a_loop_in_a_scan: lambda step, x: plainly(lambda h: plainly(step, h) * 0.5, x, 2)}


def plainly(step: Step, x: Tensor, times: int = STEPS) -> Tensor:
    for _ in range(times):
        x = step(x)
    return x


def gradients(run: Callable[..., Tensor], how: Any, hooked: bool) -> list[Any]:
    torch.manual_seed(0)
    mlp: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    if hooked:
        # (The scan itself may have none for it: docs/limits.md.)
        mlp[0].weight.register_hook(lambda g: None if g is None else g * 2)
    found = []
    for _ in range(2):
        x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()
        run(lambda h: how(mlp, h) * 0.9, x).square().sum().backward()
        found += [x.grad, *[None if p.grad is None else p.grad.clone() for p in mlp.parameters()]]
    return found


RUNS = [scanned, until, in_a_region, in_a_region_that_saves, regions_all_around, in_a_loop_in_a_scan]


@pytest.mark.parametrize(
    ("run", "how", "hooked"), crossed(RUNS, [whole, in_chunks, beside, nested], [False, True])
)
def test_weights_get_the_gradients_of_backwards_inside(run: Any, how: Any, hooked: bool) -> None:
    expected = gradients(PLAIN.get(run, plainly), how, hooked)
    for found, right in zip(gradients(run, how, hooked), expected, strict=True):
        assert found is not None
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("run", RUNS)
def test_second_derivatives_of_backwards_inside_are_refused(run: Any) -> None:
    """They evaluate steps again, which would accumulate again: weights keep the gradients that they had."""
    torch.manual_seed(0)
    mlp: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()
    out = run(lambda h: (beside(mlp, h) * 0.9).sin(), x)
    grad = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
    before = [p.grad.clone() for p in mlp.parameters()]
    with pytest.raises(RematError, match="accumulates gradients there"):
        torch.autograd.grad(grad.square().sum(), x)
    assert all(torch.equal(p.grad, g) for p, g in zip(mlp.parameters(), before, strict=True))


def test_layers_that_are_scanned_in_a_region() -> None:
    """A head that is no part of the layers, and goes backward inside of each."""

    def run(scans: bool) -> list[Any]:
        torch.manual_seed(0)
        head = nn.Linear(4, 4).double()
        stacked = torch.randn(3, 4, 4, dtype=torch.float64).requires_grad_()
        x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)

        def block(weight: Tensor, h: Tensor) -> Tensor:
            return whole(head, h @ weight).tanh()

        if scans:
            out = remat(lambda x: scan_layers(block, stacked, x))(x)
        else:
            out = plainly_over(block, stacked, x)
        out.sum().backward()
        return [head.weight.grad, head.bias.grad, stacked.grad, x.grad]

    for found, right in zip(run(True), run(False), strict=True):
        assert found is not None
        torch.testing.assert_close(found, right)


def plainly_over(block: Callable[..., Tensor], stacked: Tensor, x: Tensor) -> Tensor:
    for weight in stacked:
        x = block(weight, x)
    return x


@pytest.mark.parametrize("loop", [scanned, until])
def test_a_force_of_what_an_inner_loop_is_given_and_captures(loop: Any) -> None:
    """The outer loop evaluates its steps without grad mode, where an alias of the leaf led nowhere."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).clone().requires_grad_()

    def force(h: Tensor) -> Tensor:
        with torch.enable_grad():
            own = h if h.requires_grad else h.detach().requires_grad_()
            return x * torch.autograd.grad(own.sin().pow(2).sum(), own, create_graph=True)[0]

    def run(loop: Callable[..., Tensor]) -> Tensor:
        out = loop(lambda h: h.cos() + loop(force, x), x.detach().sin())
        return torch.autograd.grad(out.square().sum(), x)[0]

    torch.testing.assert_close(run(loop), run(plainly))
