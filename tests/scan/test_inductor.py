"""Scans whose blocks Inductor compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from remat import scan_remat
from tests.helpers import sparse

N, B, D = 19, 2, 8


@pytest.fixture
def args():
    torch.manual_seed(0)
    return tuple(torch.randn(s, requires_grad=True) for s in ((D, D), (B, D), (N, B, D)))


def gradients(body: Any, init: Any, xs: Any, targets: Any, **options: Any) -> Any:
    end, ys = scan_remat(body, init, xs, checkpoints="all", **options)
    leaves = [t for t in tree_leaves((end, ys)) if isinstance(t, torch.Tensor)]
    total = torch.stack([t.float().pow(3).sum() for t in leaves if t.is_floating_point()]).sum()
    return total, torch.autograd.grad(total, targets)


def check(body: Any, init: Any, xs: Any, targets: Any, **options: Any) -> None:
    found = gradients(body, init, xs, targets, compile=True, **options)
    torch.testing.assert_close(found, gradients(body, init, xs, targets, **options), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_body_that_computes_nothing(args):
    """Inductor hands such a graph back as it is."""
    _, h, xs = args
    check(lambda c, x: (c, None), h, xs, [h])


@pytest.mark.slow
def test_what_is_passed_on_doubled_or_called_outside_kernels(args):
    w, h, xs = args

    def body(carry, x):
        a, b, k = carry["a"], carry["b"], carry["k"]
        order = torch.sort(a, -1)[0]  # no kernel of Inductor's
        new = torch.sigmoid(order @ w) * x
        return {"a": new, "b": a, "k": k + 1}, (new, new, b.view(-1), k)

    check(body, {"a": h, "b": h, "k": torch.tensor(0)}, xs, args)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sparse(["vectors of doubles", "a gated module", "wide", "autocast"], 4))
def test_bodies(kind, args):
    w, h, xs = args
    if kind == "a gated module":
        cell = torch.nn.GRUCell(D, D)

        def body(h, x):
            h = cell(x, h)
            return h, h.sum()

        check(body, h, xs, (h, xs, *cell.parameters()))
    elif kind == "vectors of doubles":
        w, h, xs = (t.detach().double().requires_grad_() for t in (w, h[0], xs[:, 0]))
        check(lambda h, x: (torch.cos(w @ h) + x, h @ x), h, xs, (w, h, xs))
    elif kind == "wide":
        wide = torch.randn(B, 160, requires_grad=True), (torch.randn(160, 160) / 13).requires_grad_()
        check(lambda h, x: (torch.tanh(h @ wide[1]) * x.mean(), None), wide[0], xs, (*wide, xs))
    else:

        def under_autocast(h, x):
            with torch.autocast("cpu", torch.bfloat16):
                return torch.tanh((h @ w).float() + x), None

        check(under_autocast, h, xs, args)
