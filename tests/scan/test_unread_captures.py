"""Writes between forward and backward into what a scan's body leads to: refused, be it read or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import RematError, remat, scan_remat, while_remat
from tests.helpers import rand, same


class Model(nn.Module):
    """A loop over one of two weights; a flag lets the last step read the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(rand(4, 4)), nn.Parameter(rand(4, 4))
        self.reads = False

    def step(self, h: Tensor, k: Tensor) -> tuple[Tensor, None]:
        h = (h @ self.weight).sin()
        return (h @ self.other.detach() if self.reads and k == 2 else h), None


def scanned(model: Model, x: Tensor, **options: Any) -> Tensor:
    return scan_remat(model.step, x, torch.arange(3), **options)[0]


def looped(model: Model, x: Tensor) -> Tensor:
    def body(state: tuple[int, Tensor]) -> tuple[int, Tensor]:
        return state[0] + 1, model.step(state[1], torch.tensor(state[0]))[0]

    return while_remat(lambda state: state[0] < 3, body, (0, x), max_steps=4)[1]


def in_region(model: Model, x: Tensor) -> Tensor:
    return remat(lambda x: scanned(model, x))(x)


def unrolled(model: Model, x: Tensor) -> Tensor:
    for k in torch.arange(3):
        x = model.step(x, k)[0]
    return x


LOOPS = [scanned, looped, in_region]


def grads(loop: Callable[..., Tensor], model: Model, twice: bool = False) -> list[Tensor]:
    x = rand(2, 4).requires_grad_()
    out = loop(model, x).square().sum()
    with torch.no_grad():
        model.other.mul_(2.0)
    operands = [x, model.weight]
    found = torch.autograd.grad(out, operands, create_graph=twice)
    if twice:
        total = sum([g.square().sum() for g in found], torch.zeros(()))
        found = torch.autograd.grad(total, operands)
    return list(found)


WRITTEN = "written in place between its forward and its backward"


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_body_leads_to_may_not_be_written(loop, twice, reads):
    model = Model()
    model.reads = reads
    with pytest.raises(RematError, match=WRITTEN):
        grads(loop, model, twice)


@pytest.mark.parametrize("twice", [False, True])
def test_a_body_that_leads_to_what_it_reads_alone(twice):
    def loop(model: Model, x: Tensor) -> Tensor:
        weight = model.weight
        return scan_remat(lambda h, _: ((h @ weight).sin(), None), x, length=3)[0]

    model = Model()
    same(grads(loop, model, twice), grads(unrolled, model, twice))


def test_all_may_be_kept_for_a_second_backward():
    model, x = Model(), rand(2, 4).requires_grad_()
    out = scanned(model, x).sum()
    first = torch.autograd.grad(out, [x, model.weight], retain_graph=True)
    same(torch.autograd.grad(out, [x, model.weight]), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, [x, model.weight])


def compiled(model: Model, x: Tensor) -> Tensor:
    return scanned(model, x, compile="aot_eager")


def test_compiled_steps_lead_to_what_they_read_alone():
    model = Model()
    same(grads(compiled, model), grads(unrolled, model))


def test_compiled_steps_that_read_it():
    def loop(model: Model, x: Tensor) -> Tensor:
        step = lambda h, _: ((h @ model.weight).sin() @ model.other, None)  # noqa: E731
        return scan_remat(step, x, length=3, compile="aot_eager")[0]

    with pytest.raises(RematError, match=WRITTEN):
        grads(loop, Model())


def test_a_fused_optimizer_steps_in_between():
    """It counts no version up; what holds parameters is told of it."""
    model, x = Model(), rand(2, 4).requires_grad_()
    model.weight.grad = torch.ones_like(model.weight)
    out = scanned(model, x).sum()
    torch.optim.SGD([model.weight], lr=0.1, fused=True).step()
    with pytest.raises(RematError, match=WRITTEN):
        out.backward()
