"""Transforms inside a region that are handed captured tensors; and runs that begin again when one is met."""

import threading
from typing import Any

import pytest
import torch
from torch.func import grad

from remat import remat, scan_remat
from tests.helpers import rand, same


def test_a_scan_that_begins_again_draws_from_an_own_generator_once():
    def drawn(scan):
        w, own = rand(3, seed=1).requires_grad_(), torch.Generator().manual_seed(5)
        hidden = iter([w * 2] * 50)
        out = scan(lambda c: (c * torch.rand(3, generator=own) * next(hidden)).sin(), rand(3))
        return out.detach(), own.get_state()

    def scanned(step, x):
        return scan_remat(lambda c, _: (step(c), None), x, length=3)[0]

    same(drawn(scanned), drawn(lambda step, x: step(step(step(x)))))


def scanned(f: Any, length: int = 2) -> Any:
    return lambda x: scan_remat(lambda c, _: (f(c), None), x, length=length)[0]


@pytest.mark.parametrize("before", ["under hooks", "on another thread"])
def test_regions_inside_leave_the_way_for_a_transform(before):
    """What runs in between must not have the next transform refused: the function would run twice."""
    runs = [0]

    def part(x: torch.Tensor) -> torch.Tensor:
        if before == "under hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                return remat(torch.sin)(x)
        y = rand(3, seed=2).requires_grad_()
        thread = threading.Thread(target=lambda: remat(torch.sin)(y).sum().backward())
        thread.start()
        thread.join()
        return x.sin()

    def f(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        out = part(x) * torch.rand_like(x)
        return grad(lambda x: (x.sin() * x).sum())(x) * out

    def step(fn: Any) -> Any:
        torch.manual_seed(0)
        x = rand(3).requires_grad_()
        out = fn(x)
        return out, runs[0], torch.get_rng_state(), torch.autograd.grad(out.sum(), x)

    expected, runs[0] = step(f), 0
    same(step(remat(f)), expected)
