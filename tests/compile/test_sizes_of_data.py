"""Regions in graphs whose sizes depend on data: rows that are picked by a mask."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad

from remat import remat, save_matmuls, save_nothing
from tests.helpers import TORCH, crossed, rand

W = rand(4, 4, seed=1)


def scattered(x, w):
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return torch.zeros_like(x).index_add(0, rows, (x[rows] @ w).sin())


def masked_mean(x, w):
    return ((x @ w)[x > 0] @ (x @ w)[x > 0]).cos() * x


def experts(x, w):
    best = (x @ w)[:, :2].argmax(-1)
    out = torch.zeros_like(x)
    for number in range(2):
        rows = (best == number).nonzero()[:, 0]
        out = out.index_add(0, rows, (x[rows] @ w * (number + 1)).tanh())
    return out


WAYS = {
    "grad": lambda fn: grad(lambda x, w: fn(x, w).square().sum(), (0, 1)),
    "backward": lambda fn: lambda x, w: fn(x, w).square().sum(),
}


@pytest.mark.parametrize(
    ("fn", "way", "policy"),
    crossed([scattered, masked_mean, experts], WAYS, [save_nothing, save_matmuls], every=2),
)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)  # pyright: ignore[reportPrivateImportUsage]
def test_it_is_as_in_eager(fn, way, policy):
    if way == "grad" and TORCH < (2, 13):
        pytest.skip("torch does not trace it, without regions too")
    found = []
    for run in (WAYS[way](fn), torch.compile(WAYS[way](remat(fn, policy=policy)), backend="aot_eager")):
        x, w = (
            rand(6, 4, seed=2).requires_grad_(way == "backward"),
            W.clone().requires_grad_(way == "backward"),
        )
        out = run(x, w)
        found.append(torch.autograd.grad(out, (x, w)) if way == "backward" else out)
    torch.testing.assert_close(found[1], found[0])
