"""OpInfo.flops: what policies by cost are told, against what torch's own counter counts."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from remat import register_op
from tests.helpers import TORCH, Watched, rand
from tests.policies.inside import OpInfo, TensorMeta, describe, known_flops

aten = torch.ops.aten


def counted(fn, *args):
    flops = []

    def look(op, args, kwargs, out):
        outs = out if isinstance(out, tuple) else (out,)
        flops.append(OpInfo(op, describe(args), describe(kwargs), describe(outs)).flops)

    with Watched(look):
        fn(*args)
    return sum(flops)


def by_torch(fn, *args):
    with FlopCounterMode(display=False) as counter:
        fn(*args)
    return counter.get_total_flops()


IMAGE, KERNEL = rand(2, 3, 8, 8), rand(4, 3, 3, 3)
CALLS = {
    "mm": (torch.mm, rand(3, 4), rand(4, 5)),
    "addmm": (F.linear, rand(3, 4), rand(5, 4), rand(5)),
    "bmm": (torch.bmm, rand(2, 3, 4), rand(2, 4, 5)),
    "baddbmm": (torch.baddbmm, rand(2, 3, 5), rand(2, 3, 4), rand(2, 4, 5)),
    "conv2d": (F.conv2d, IMAGE, KERNEL),
    "conv2d of stride 2 with bias": (lambda x, w, b: F.conv2d(x, w, b, stride=2), IMAGE, KERNEL, rand(4)),
    "conv_transpose": (F.conv_transpose2d, IMAGE, rand(3, 4, 3, 3)),
    "nothing costly": (lambda x: x.sin().softmax(-1).sum(), rand(3, 4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_counts_what_torch_counts(name):
    assert counted(*CALLS[name]) == by_torch(*CALLS[name])
    assert (counted(*CALLS[name]) == 0) == (name == "nothing costly")


def test_convolution_backward():
    def step(x, w):
        F.conv2d(x, w).sum().backward()

    args = [t.detach().requires_grad_() for t in (IMAGE, KERNEL)]
    assert counted(step, *args) == by_torch(step, *args) > 2 * counted(*CALLS["conv2d"])


@pytest.mark.parametrize("key_heads", [1, 4])
def test_fused_attention_of_a_cpu_has_a_formula_too(key_heads):
    query, key = torch.rand(2, 4, 8, 6), torch.rand(2, key_heads, 8, 6)

    def attend(query, key):
        return F.scaled_dot_product_attention(query, key, key, enable_gqa=key_heads == 1)

    assert counted(attend, query, key) == 2 * (2 * 2 * 4 * 8 * 8 * 6)


def test_formulas_that_torch_lacks():
    assert counted(torch.mv, rand(3, 4), rand(4)) == counted(torch.mm, rand(3, 4), rand(4, 1)) == 24
    assert counted(torch.dot, rand(4), rand(4)) == 8
    small = torch.ones(32, 16, dtype=torch.int8)
    assert counted(aten._int_mm, small, small.t().contiguous()) == 2 * 32 * 16 * 32


def meta(*shape):
    return TensorMeta.of(torch.empty(shape, device="meta"))


def test_formulas_that_read_tensors_themselves():
    """torch registers some with get_raw=True; lengths of packed sequences are taken to be the longest."""
    q = meta(2, 5, 3, 4)
    flash = OpInfo(
        aten._flash_attention_forward.default, (q, q, q, None, None, 5, 5, 0.0, False, False), {}, (q,)
    )
    # As torch counts: up to 2.13 it takes the second dimension for the heads.
    heads, rows = (5, 3) if TORCH < (2, 14) else (3, 5)
    assert flash.flops == 2 * (2 * 2 * heads * rows * rows * 4)
    packed, offsets = meta(10, 3, 4), meta(3)
    info = OpInfo(
        aten._flash_attention_forward.default,
        (packed, packed, packed, offsets, offsets, 5, 5, 0.0, False, False),
        {},
        (packed,),
    )
    assert info.flops == 2 * 2 * (2 * 3 * 5 * 5 * 4)


def test_flex_attention():
    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

    q, lse = meta(2, 3, 16, 4), meta(2, 3, 16)
    info = OpInfo(flex_attention, (q, q, q, None, (), 0.5, {}, (), ()), {}, (q, lse))
    assert info.flops == 2 * (2 * 2 * 3 * 16 * 16 * 4)
    given = (q, q, q, q, lse, q, lse, None, None, (), 0.5, {}, (), ())
    assert OpInfo(flex_attention_backward, given, {}, (q, q, q)).flops == 5 * (2 * 2 * 3 * 16 * 16 * 4)


def test_a_registered_cost_comes_first():
    @torch.library.custom_op("remat_tests::tower", mutates_args=())
    def tower(x: torch.Tensor, *, depth: int) -> torch.Tensor:
        return x * depth

    assert counted(lambda x: tower(x, depth=3), rand(2, 2)) == 0
    register_op(tower, flops=lambda x, depth: depth * x.numel())
    assert counted(lambda x: tower(x, depth=3), rand(2, 2)) == 12


def test_an_op_without_formula_is_told_from_one_that_costs_nothing():
    assert (
        known_flops(aten.sin.default, (meta(3),), {}, (meta(3),), lambda x: isinstance(x, TensorMeta)) is None
    )


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (True, True, False)])
@pytest.mark.parametrize("left_out", [False, True])
def test_a_convolutions_gradients_that_are_not_wanted(mask, left_out):
    """They are None among the results, or are left out of a graph's: one is counted as two are."""
    grad, x, w = (
        TensorMeta.of(torch.empty(s, device="meta")) for s in ((2, 4, 6, 6), (2, 3, 8, 8), (4, 3, 3, 3))
    )
    args = (grad, x, w, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, list(mask))
    outs = [made if wanted else None for made, wanted in zip((x, w, None), mask, strict=True)]
    outs = [out for out in outs if out is not None] if left_out else outs
    forward = 2 * 2 * 4 * 3 * 36 * 9
    flops = known_flops(
        aten.convolution_backward.default, args, {}, tuple(outs), lambda t: isinstance(t, TensorMeta)
    )
    assert flops == forward * sum(mask)
