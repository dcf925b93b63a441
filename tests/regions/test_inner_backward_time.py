"""Implicit layers, whose backward differentiates inside of the pass: what runs again is planned once."""

import pytest
import torch

from remat import remat
from tests.helpers import OpCounter
from tests.regions.inside import program as room


class Root(torch.autograd.Function):
    """x with f(x) = y, by bisection; the backward differentiates f at the root."""

    @staticmethod
    def forward(ctx, f, y, phi):
        low, high = torch.full_like(y, -10), torch.full_like(y, 10)
        for _ in range(20):
            middle = (low + high) / 2
            up = f(middle) < y
            low, high = torch.where(up, middle, low), torch.where(up, high, middle)
        ctx.f = f
        ctx.save_for_backward((low + high) / 2, phi)
        return (low + high) / 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        x, phi = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.f(x)
        (d,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        (gp,) = torch.autograd.grad(y, phi, -g / d, retain_graph=True)
        return None, g / d, gp


W = (torch.randn(8, 8) / 4).requires_grad_()


def layers(y):
    for _ in range(4):
        phi = torch.sigmoid(y @ W)
        a = torch.tanh(phi)
        y = Root.apply(lambda x, a=a: x + torch.tanh(a * x), y, phi)
    return y


def shared(y):
    phi = torch.sigmoid(y @ W)
    for _ in range(3):
        a = torch.tanh(phi).sin()
        y = Root.apply(lambda x, a=a: x + torch.tanh(a * x), y.cos(), phi)
    return y


def inside(y):
    return remat(layers)(y.sin()).cos()


@pytest.mark.parametrize("program", [layers, shared, inside], ids=lambda p: p.__name__)
def test_steps_are_listed_once(program, monkeypatch):
    made = []
    monkeypatch.setattr(room, "_step", lambda *args, make=room._step: made.append(1) or make(*args))
    y, region = torch.randn(16, 8), remat(program)
    without = program if program is not inside else lambda y: layers(y.sin()).cos()
    for call in range(4):
        made.clear()
        (got,) = torch.autograd.grad(region(y).square().sum(), W)
        assert torch.equal(got, torch.autograd.grad(without(y).square().sum(), W)[0])
        if call == 3:
            assert made == []  # four lists of the whole tape in every pass before


COUNTS = {"layers": (layers, 4), "shared": (shared, 1), "inside": (inside, 4)}


@pytest.mark.parametrize("program, expected", COUNTS.values(), ids=COUNTS)
def test_passes_inside_of_a_pass_share_what_ran_again(program, expected):
    region = remat(program)
    for _ in range(3):
        loss = region(torch.randn(16, 8)).square().sum()
        with OpCounter() as ran:
            torch.autograd.grad(loss, W)
        assert ran["sigmoid"] == expected  # 36, 7 and 36 where each pass threw the other's away
