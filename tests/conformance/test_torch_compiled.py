"""torch's own tests of checkpointing in compiled code, continued: see test_torch_tags.py.

Of test/dynamo/test_activation_checkpointing.py, those that mean something on a CPU.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from remat.interop import checkpoint
from tests.compiled import compiled, dots, ops
from tests.conformance.counting import COMPILES
from tests.conformance.rows import row
from tests.conformance.test_torch_selective import saves, selective
from tests.conformance.test_torch_tags import counts_of_graphs, twice
from tests.conformance.torchs import leaf
from tests.helpers import sparse

aten = torch.ops.aten
pytestmark = [
    COMPILES,
    pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Of Dynamo, after a graph break: it looks at what the rest of the function is called with.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(1)


# -- what each graph runs: names, and counts in forward and backward ----------------------------------


def layers(x):
    x = x.cos()
    for _ in range(3):
        x = torch.mm(x, x)
    return x.cos()


def with_none(x, y, z=None):
    a = torch.matmul(x, y)
    return a if z is None else torch.matmul(a, z)


class MyMM(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


def every_mm_but_the_second():
    """Contexts of a policy that counts for itself, in either pass."""
    seen = {}

    def policy(ctx, op, *args, **kwargs):
        if op is not aten.mm.default:
            return False
        seen[ctx.is_recompute] = seen.get(ctx.is_recompute, 0) + 1
        return seen[ctx.is_recompute] != 2

    return create_selective_checkpoint_contexts(policy)


def contexts(kept):
    return create_selective_checkpoint_contexts(kept)


def outplace(x, y):
    return torch.sigmoid(torch.selu(torch.matmul(torch.matmul(x, y), y))).relu()


def inplace(x, y):
    return torch.sigmoid(torch.selu_(torch.matmul(torch.matmul(x, y), y)))


def recorded(x, y):
    with torch.profiler.record_function("matmul_region"):
        return torch.sigmoid(torch.matmul(x, y))


@torch._dynamo.allow_in_graph
def op_with_detach(x):
    a = x.sin()
    return (a.detach() + a).cos()


def sparse_rule(ctx, op, *args, **kwargs):
    again = op in {aten.mul.Tensor, aten.sigmoid.default}
    return CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE


class Squashed(nn.Module):
    def forward(self, w):
        context_fn = functools.partial(create_selective_checkpoint_contexts, sparse_rule)
        return checkpoint(lambda w: torch.sigmoid(torch.mul(w, w)), w, context_fn=context_fn)


def parametrized():
    net = nn.Linear(16, 16, bias=False)
    nn.utils.parametrize.register_parametrization(net, "weight", Squashed(), unsafe=True)
    return net


def gelu_layer():
    net = nn.Linear(10, 10)
    return lambda x: checkpoint(lambda x: F.gelu(net(x)), torch.sin(x))


def region(fn, **options):
    return lambda *args: checkpoint(fn, *args, **options)


MM = selective([aten.mm.default])
MM_SIGMOID = selective([aten.mm.default, aten.sigmoid.default])
SQUARES = (4, 4), (4, 4)
DECOMPOSED = {"decompositions": select_decomp_table}
# The function, shapes of its arguments, the ops counted in forward and backward, options of AOTAutograd.
COUNTS = {
    "test_tags_sequential_layers": (
        lambda x: checkpoint(layers, checkpoint(layers, x)),
        [(4, 4)],
        {"mm": (6, 18), "cos": (4, 2)},
        {},
    ),
    "test_tags_decomps": (gelu_layer(), [(10, 10)], {"erf": (1, 1)}, DECOMPOSED),
    "test_tags_rand": (
        lambda x, y: torch.sin(checkpoint(lambda x, y: (x @ y) @ y, torch.sin(x), y)),
        SQUARES,
        {"mm": (2, 5)},
        {},
    ),
    "test_kwargs": (
        lambda x, y, z: torch.cos(checkpoint(with_none, x, y, z=z)),
        [(4, 4)] * 3,
        {"mm": (2, 5)},
        {},
    ),
    "test_ac_tags_through_custom_autograd_function": (
        region(lambda x, w: MyMM.apply(x, w).sin()),
        SQUARES,
        {"mm": (1, 3)},
        {},
    ),
    "test_sac_tags_through_custom_autograd_function": (
        region(lambda x, w: MyMM.apply(x, w).sin(), context_fn=MM),
        SQUARES,
        {"mm": (1, 2)},
        {},
    ),
    "test_compile_selective_checkpoint_custom_rule": (
        region(
            lambda x, y: torch.sigmoid(torch.sigmoid(torch.matmul(torch.matmul(x, y) * y, y) * y)),
            context_fn=every_mm_but_the_second,
        ),
        SQUARES,
        {"mm": (2, 5)},
        {},
    ),
    "test_compile_selective_checkpoint_partial_ctx_fn": (
        region(twice, context_fn=functools.partial(contexts, [aten.mm.default])),
        SQUARES,
        {"mm": (2, 4)},
        {},
    ),
    "test_compile_selective_checkpoint_list_ops": (
        region(lambda x, y: torch.cat([x, y]).sin(), context_fn=selective(saves())),
        SQUARES,
        {"cat": (1, 1)},
        {},
    ),
    "test_compile_selective_checkpoint_outplace_op": (
        region(outplace, context_fn=MM_SIGMOID),
        SQUARES,
        {"mm": (2, 4), "sigmoid": (1, 0)},
        {},
    ),
    "test_compile_selective_checkpoint_inplace_op": (
        region(inplace, context_fn=MM_SIGMOID),
        SQUARES,
        {"mm": (2, 4), "sigmoid": (1, 0)},
        {},
    ),
    "test_compile_selective_checkpoint_parametrization": (
        parametrized(),
        [(8, 16)],
        {"mul": (1, 3), "sigmoid": (1, 1)},
        {},
    ),
    "test_checkpoint_with_record_function": (
        lambda x, y: checkpoint(recorded, torch.sin(x), y),
        SQUARES,
        {"mm": (1, 3)},
        {},
    ),
    "test_multi_output_op": (
        region(lambda x: torch.topk(x.sin(), k=2)[0].sum().cos(), context_fn=selective([aten.topk.default])),
        [(4,)],
        {"topk": (1, 0)},
        {},
    ),
    "test_post_mode_decomp": (
        region(lambda x: F.silu(x.sin()).cos(), context_fn=selective([aten.silu.default])),
        [(4,)],
        {"exp": (1, 0), "div": (1, 0)},
        DECOMPOSED,
    ),
    "test_pre_mode_decomp_has_sac_ignored_ops": (
        region(op_with_detach, context_fn=selective([aten.sin.default, aten.add.Tensor, aten.cos.default])),
        [(4,)],
        {"add": (1, 0)},
        {},
    ),
}


@row("pass", "the concatenation runs again", name="test_compile_selective_checkpoint_list_ops")
@row("pass", "2 and 4 products, 1 and 0 sigmoids", name="test_compile_selective_checkpoint_outplace_op")
@row(
    "adapted",
    "the same; torch skips it. Its second write, over a sigmoid, no autograd allows",
    name="test_compile_selective_checkpoint_inplace_op",
)
@row("pass", "a policy that counts for itself", name="test_compile_selective_checkpoint_custom_rule")
@row(
    "pass",
    "1 and 3 products by itself, 1 and 1 sigmoids",
    name="test_compile_selective_checkpoint_parametrization",
)
@row("pass", "6 and 18 products, 2 cosines again", name="test_tags_sequential_layers")
@row("pass", "the error function runs again", name="test_tags_decomps")
@row(
    "adapted",
    "counts, in place of tags",
    name="""
        test_ac_tags_through_custom_autograd_function test_sac_tags_through_custom_autograd_function
        test_pre_mode_decomp_has_sac_ignored_ops""",
)
@row("adapted", "the kept `silu` does not run again in pieces", name="test_post_mode_decomp")
@row("adapted", "`topk` does not run again", name="test_multi_output_op")
@pytest.mark.parametrize("name", sparse(COUNTS))
def test_counts(name):
    fn, shapes, counts, options = COUNTS[name]
    forward, backward = counts_of_graphs(fn, *[leaf(*shape) for shape in shapes], **options)
    assert {op: (forward[op], backward[op]) for op in counts} == counts


@row("pass", "the mask is drawn again, the same, in either setting")
def test_compile_selective_checkpoint_random_op():
    """Neither sigmoid runs again, and the mask is drawn again, the same. Its numbers are not eager's."""
    context_fn = selective([aten.sigmoid.default])
    fn = region(
        lambda x: torch.sigmoid(torch.dropout(torch.sigmoid(x), p=0.5, train=True)), context_fn=context_fn
    )
    forward, backward = counts_of_graphs(fn, leaf(8, 8), check=False)
    assert (forward["sigmoid"], backward["sigmoid"]) == (2, 0)
    x = leaf(8, 8)
    out = compiled(fn)(x)
    (got,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(got != 0, out != 0.5) and 0 < (got != 0).sum() < 64


@row("pass", "`TwoTensor`: 4 and 8")
def test_compile_selective_checkpoint_tensor_subclass():
    counts = []

    def compiler(graph, _):
        counts.append(dots(ops(graph)))
        return make_boxed_func(graph.forward)

    fn, values = region(twice, context_fn=MM), torch.randn(4, 4)
    pairs = [[TwoTensor(values.clone(), values.clone()).requires_grad_() for _ in "xy"] for _ in range(2)]
    for f, pair in zip(
        (compiled(fn, aot_autograd(fw_compiler=compiler, bw_compiler=compiler)), fn), pairs, strict=True
    ):
        f(*pair).sum().backward()
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close((one.grad.a, one.grad.b), (other.grad.a, other.grad.b))
    assert counts == [4, 8]


@row("pass", "the CPU's kernel: once again")
def test_autocast_flash_attention():
    def fn(*args):
        with torch.autocast("cpu"):
            return checkpoint(F.scaled_dot_product_attention, *args)

    forward, backward = counts_of_graphs(fn, *[leaf(2, 2, 8, 16) for _ in range(3)])
    assert forward["_scaled_dot_product_flash_attention_for_cpu"] == 1
    assert backward["_scaled_dot_product_flash_attention_for_cpu"] == 1
