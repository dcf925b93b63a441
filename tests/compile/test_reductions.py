"""Reductions that run again in a compiled backward have the forward's bits on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from remat import remat
from tests.compiled import compiled

REDUCTIONS = {
    "sum": lambda x: x.sum(-1, keepdim=True),
    "columns": lambda x: x.mean(0, keepdim=True),
    "all": lambda x: x.square().sum(),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "var": lambda x: x.var(-1, keepdim=True),
}


def differing(kinds, shape, seeds: int) -> dict[str, int]:
    """How often each reduction had other bits in the recomputation.

    A region returns its reduction times ones. The derivative by these ones is what the recomputation has.
    """
    regions = {kind: remat(lambda x, one, f=REDUCTIONS[kind]: f(x.sin() * x) * one) for kind in kinds}
    torch._dynamo.reset()
    run = compiled(lambda x, ones: [regions[k](x, o) for k, o in zip(kinds, ones, strict=True)], "inductor")
    found = dict.fromkeys(kinds, 0)
    for seed in range(seeds):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=draw).requires_grad_()
        ones = [torch.ones(shape, requires_grad=True) for _ in kinds]
        outs = run(x, ones)
        _, *again = torch.autograd.grad(outs, [x, *ones], [torch.ones_like(out) for out in outs])
        for kind, out, got in zip(kinds, outs, again, strict=True):
            found[kind] += not torch.equal(out, got)
    return {kind: count for kind, count in found.items() if count}


@pytest.mark.slow
def test_a_recomputed_reduction_has_the_forwards_bits():
    assert not differing(["softmax"], (9, 130), seeds=5)


@pytest.mark.slow
def test_recomputed_reductions_have_the_forwards_bits():
    assert not differing(list(REDUCTIONS), (33, 1030), seeds=300)
