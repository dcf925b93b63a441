"""A recurrent scan as `scan_remat` and as a loop, for tests that compare the two under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remat import scan_remat
from tests.scan.inside import entry

# Steps in a compiled block: what is tested does not depend on it, and less is compiled.
BLOCK = 4
D, N = 3, 2 * BLOCK + 3


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(entry, "BLOCK", BLOCK)
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def make(*batch: int, n: int = N) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*batch, *s, dtype=torch.float64) for s in ((D, D), (D,), (n, D)))


def step(w, h, x):
    h = torch.tanh(h @ w + x)
    return h, h.sin() * x


def of_scan(checkpoints: Any, reverse: bool = False):
    def loss(w, h, xs):
        end, ys = scan_remat(lambda h, x: step(w, h, x), h, xs, checkpoints=checkpoints, reverse=reverse)
        return end.pow(3).sum() + (ys * torch.arange(len(xs), dtype=ys.dtype)[:, None]).sum()

    return loss


def of_loop(reverse: bool = False):
    def loss(w, h, xs):
        ys: list[Any] = [None] * len(xs)
        for k in reversed(range(len(xs))) if reverse else range(len(xs)):
            h, ys[k] = step(w, h, xs[k])
        return h.pow(3).sum() + (torch.stack(ys) * torch.arange(len(xs), dtype=h.dtype)[:, None]).sum()

    return loss


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def backward(fn, args):
    leaves = [t.clone().requires_grad_() for t in args]
    return torch.autograd.grad(fn(*leaves), leaves)


def nested(w, h, xs):
    def body(h, x):
        end, ys = scan_remat(lambda h, y: step(w, h, x * y), h, xs[:4], checkpoints="sqrt")
        return end, ys.sum()

    end, ys = scan_remat(body, h, xs, checkpoints=2)
    return end.sum() + ys.pow(2).sum()
