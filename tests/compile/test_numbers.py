"""Python numbers in graphs of dynamic shapes: Dynamo makes tensors of floats, which regions must not lose."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.variables.builder import VariableBuilder
from torch.func import grad

from remat import checkpoint_policy, remat, save_matmuls, scan_remat
from tests.compiled import Graphs, compiled
from tests.helpers import rand, same

LAYER = nn.LayerNorm(4, eps=0.1).double()
REGIONS = {
    "layer": lambda wrap: wrap(lambda x, e: LAYER(x) * e),
    "eps": lambda wrap: wrap(lambda x, e: F.layer_norm(x @ x.mT, (x.shape[0],), eps=e)),
    "nested": lambda wrap: wrap(lambda x, e: wrap(LAYER)(x.sin()) + wrap(lambda x, e: x * e)(x, e)),
    "scan_inside": lambda wrap: wrap(
        lambda x, e: scan_remat(lambda h, _: (LAYER(h) * e, None), x, length=3)[0]
    ),
}
WAYS = {
    "backward": lambda fn, x, e: torch.autograd.grad(fn(x, e).sin().sum(), x),
    "grad": lambda fn, x, e: grad(lambda x: fn(x, e).sin().sum())(x.detach()),
}


@pytest.mark.slow
@pytest.mark.parametrize("region", REGIONS)
def test_floats_of_the_caller_and_of_modules(region):
    fn = REGIONS[region](lambda fn: remat(fn, policy=save_matmuls))
    expected = REGIONS[region](lambda fn: fn)
    graphs = Graphs(fn, dynamic=True)
    for rows, e in ((3, 0.5), (5, 0.25)):
        x = rand(rows, 4).requires_grad_()
        same(WAYS["backward"](graphs, x, e), WAYS["backward"](expected, x, e))


@pytest.mark.slow
def test_under_a_transform_and_a_budget():
    plain = REGIONS["eps"](lambda fn: fn)
    region = remat(plain, policy=checkpoint_policy(budget=0.5))
    graphs = Graphs(lambda x, e: WAYS["grad"](region, x, e), dynamic=True)
    for rows, e in ((3, 0.5), (5, 0.25)):
        same(graphs(rand(rows, 4), e), WAYS["grad"](plain, rand(rows, 4), e))


@pytest.mark.slow
def test_a_float_that_several_regions_read():
    """Dynamo made a value of it in the first region's graph, and died of an assertion in the second."""
    config = SimpleNamespace(scale=0.5)

    def step(wrap):
        one = wrap(lambda x: x.sin() * config.scale)
        other = wrap(lambda x: one(x.cos()) + x**config.scale)
        return lambda x: other(one(x).exp()).mean() + config.scale

    run, plain = compiled(step(remat), dynamic=None), step(lambda fn: fn)
    for scale in (0.5, 0.25, 0.125):
        config.scale = scale
        x = rand(3, 4).requires_grad_()
        same(torch.autograd.grad(run(x), x), torch.autograd.grad(plain(x), x))
        same(compiled(grad(step(remat)), dynamic=True)(x.detach()), grad(plain)(x.detach()))


@pytest.mark.slow
def test_a_float_that_two_scans_read():
    config = SimpleNamespace(scale=0.5)

    def step(h, _):
        return h.sin() * config.scale, None

    def twice(h):
        return scan_remat(step, scan_remat(step, h, length=2)[0], length=3)[0].sum()

    run, x = compiled(twice, dynamic=True), rand(3, 4).requires_grad_()
    same(torch.autograd.grad(run(x), x), torch.autograd.grad(twice(x), x))


def test_what_makes_values_of_floats_is_dynamos_own_afterwards():
    """Regions share a float by another method of Dynamo's, which stayed for good."""
    usual = VariableBuilder.wrap_symfloat
    assert usual.__module__ == "torch._dynamo.variables.builder"
    x, met = rand(3), []

    def seen(x):
        met.append(VariableBuilder.wrap_symfloat is not usual)
        return x

    torch.compiler.assume_constant_result(seen)
    compiled(remat(lambda x: x.sin() * seen(2.0)), dynamic=True)(x)
    assert met == [True] and VariableBuilder.wrap_symfloat is usual
    with pytest.raises(RuntimeError):
        compiled(remat(lambda x: print(x) or x.sin()))(x)
    assert VariableBuilder.wrap_symfloat is usual
