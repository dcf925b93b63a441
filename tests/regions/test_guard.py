"""Guards compare a forward with a tape, op by op: operands, one tape for layers alike, torch's bindings."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from remat import remat, save_matmuls, save_nothing
from tests.helpers import Watched, gradients, rand as values, same
from tests.regions.inside import direct_call, modes, tensors_in

aten = torch.ops.aten


def rand(*shape, seed=0):
    return values(*shape, seed=seed).requires_grad_()


# -- operands ----------------------------------------------------------------------------------------------


def test_an_operand_in_two_places():
    """One tensor for two arguments, where there were two."""
    fn = remat(lambda a, b: (a.sin() * b).exp(), policy=save_nothing)
    x, y = rand(3), rand(3, seed=1)
    for a, b in ((x, y), (x, y), (x, x), (y, y), (x, y)):
        leaves = [a] if a is b else [a, b]
        same(gradients(fn(a, b), leaves), gradients((a.sin() * b).exp(), leaves))


# -- layers alike -------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, eps=1e-5, scale=1.0):
        super().__init__()
        self.norm, self.up, self.scale = nn.LayerNorm(4, eps=eps), nn.Linear(4, 4), scale

    def forward(self, x):
        return x + self.scale * F.gelu(self.up(self.norm(x)))


def run(layers, policy):
    """Two calls of each, held against the same without remat."""
    regions = [remat(layer, policy=policy) for layer in layers]
    for _ in range(2):
        for layer, region in zip(layers, regions, strict=True):
            x = rand(2, 4).detach().to(layer.up.weight.dtype).requires_grad_()
            leaves = [x, *layer.parameters()]
            same(gradients(region(x), leaves), gradients(layer(x), leaves))


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls])
def test_layers_alike_have_one_tape(forwards, policy):
    layers = [Layer() for _ in range(3)]
    run(layers, policy)
    assert [became for became, _ in forwards] == ["recorded", *["followed"] * 5]
    assert len({id(tape) for _, tape in forwards}) == 1
    # Nothing of it outlives them.
    ref = weakref.ref(forwards[-1][1])
    del layers, forwards[:]
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize(
    "layers",
    [
        [Layer(), Layer(eps=1e-6)],
        [Layer(scale=0.0), Layer(scale=-0.0)],
        [Layer(scale=2), Layer(scale=2.0)],
        [Layer(), Layer().double()],
    ],
    ids=["epsilon", "sign of zero", "type of a number", "dtype"],
)
def test_layers_that_differ_do_not(forwards, layers):
    run(layers, save_nothing)
    # The second one is held against the trace of the first, where its call looks the same.
    first, second, *rest = [became for became, _ in forwards]
    assert first == "recorded" and second in ("left", "recorded") and rest == ["followed"] * 2
    assert forwards[2][1] is not forwards[3][1]


def ones_like(mask, h):
    return h * torch.ones_like(mask).to_dense()


def filled(mask, h):
    return h * torch.empty_like(mask).zero_().to_dense()


def zeros_beside(mask, h):
    return (torch.zeros_like(mask).to_dense() + h).sin() * torch.ones_like(mask).to_dense()


class Masked(nn.Module):
    def __init__(self, mask, fn):
        super().__init__()
        self.weight, self.mask, self.fn = nn.Parameter(values(4, 4)), mask, fn

    def forward(self, x):
        return self.fn(self.mask, torch.tanh(x @ self.weight)).cos() + x


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=str)
@pytest.mark.parametrize("fn", [ones_like, filled, zeros_beside])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_buffer_where_a_layer_of_the_class_has_a_dense_one(fn, policy):
    """(The second layer's backward raised.)"""
    mask = values(4, 4, seed=2).relu()
    for sparse in (mask.to_sparse_csc(), mask.to_sparse_csr()):
        layers = [Masked(mask, fn), Masked(sparse, fn)]
        regions = [remat(layer, policy=policy) for layer in layers]
        for _ in range(2):
            x = rand(4, 4, seed=3)
            leaves = [x, *[layer.weight for layer in layers]]
            want = layers[1](layers[0](x))
            same(gradients(regions[1](regions[0](x)), leaves), gradients(want, leaves))


def test_a_layer_that_goes_another_way_leaves_the_others_on_their_tape(forwards):
    layers = [Layer() for _ in range(3)]
    run(layers, save_matmuls)
    layers[1].scale = 3.0
    del forwards[:]
    run(layers, save_matmuls)
    tapes = [tape for _, tape in forwards]
    assert tapes[0] is tapes[2] is tapes[3] is tapes[5]
    assert tapes[1] is not tapes[0] and tapes[4] is not tapes[0]


# -- torch's bindings ----------------------------------------------------------------------------------------

X, Y, Z = torch.randn(2, 3), torch.randn(2, 3), torch.randn(3, 2)
CUBE = torch.randn(2, 3, 3)
UNARY = "rsqrt relu sigmoid tanh neg exp sin cos gelu silu".split()
CALLS = {
    **{getattr(aten, name).default: (X.abs(),) for name in UNARY},
    **{getattr(aten, name).Tensor: (X, Y) for name in ("add", "sub", "mul", "div")},
    aten.t.default: (X,),
    aten.transpose.int: (X, 0, 1),
    aten.permute.default: (X, [1, 0]),
    aten.unsqueeze.default: (X, 1),
    aten.select.int: (X, 1, 2),
    aten.unbind.int: (X, 1),
    aten._softmax.default: (X, -1, False),
    aten.native_layer_norm.default: (X, [3], torch.ones(3), None, 1e-5),
    aten.mean.dim: (X, [1], True),
    aten.pow.Tensor_Scalar: (X, 2),
    aten.view.default: (X, [3, 2]),
    aten.expand.default: (X, [4, 2, 3]),
    aten.mm.default: (X, Z),
    aten.bmm.default: (CUBE, CUBE),
    aten.addmm.default: (torch.ones(2), X, Z),
    aten.baddbmm.default: (CUBE, CUBE, CUBE),
}


def test_every_binding_is_tried():
    assert CALLS.keys() == modes._bindings.keys()


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_a_binding_calls_its_op(op):
    """And with the same arguments: what it reads of them is what the op is given."""
    args = CALLS[op]
    count = next((i for i, arg in enumerate(args) if not isinstance(arg, torch.Tensor)), len(args))
    calls, outs = [], []
    for call in (op, direct_call(op, count)):
        calls.append([])
        with torch.no_grad(), Watched(lambda op, args, kwargs, _: calls[-1].append((op, args, kwargs))):
            outs.append(list(tensors_in(call(*args))))
    assert direct_call(op, count) is modes._bindings[op][0]
    assert repr(calls[0]) == repr(calls[1]) and calls[0][0][0] is op
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(*outs, strict=True))


def test_a_number_in_the_place_of_a_tensor_is_left_to_the_op():
    assert direct_call(aten.mul.Tensor, 1) is aten.mul.Tensor._op
    x = rand(3)
    for _ in range(3):
        same(
            gradients(remat(lambda x: ((x * 2).sin() * 3.5 + 1).exp())(x), [x]),
            gradients(((x * 2).sin() * 3.5 + 1).exp(), [x]),
        )
