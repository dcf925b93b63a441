"""Tiles that write to buffers, regions without gradients in regions, and results stored beside a loop."""

from __future__ import annotations

import torch

from tests.bank.library import LOOP, TILED, R
from tests.bank.program import program


@program("", "nests")
def region_inside_without_gradients(m, x, y):
    with torch.no_grad():
        scale = R(lambda x: m.lin(x).sin(), "matmuls")(x.exp())
    return scale * x * y


@program("", "nests scans buffers")
def tiles_that_count(m, x, y):
    def counted(x, y):
        m.steps.add_(x.shape[0])
        return torch.tanh(x @ m.w) * y.cos()

    return TILED(counted, x, y, tiles=3)


@program("", "state stores", found="counted/nothing")
def result_stored_beside_loop(m, x, y):
    out = LOOP(lambda h: (h @ m.w).tanh(), x, 2)
    m.last = (x * 2).exp()[0] * out[0]
    return out * y
