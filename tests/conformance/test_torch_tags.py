"""torch's own tests of checkpointing in compiled code, by their names.

Of test/dynamo/test_activation_checkpointing.py; docs/measured/trust.md has the table of all.
"""

import functools

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from remat.interop import checkpoint
from tests.compiled import compiled, dots, ops
from tests.conformance.counting import COMPILES
from tests.conformance.rows import row
from tests.conformance.test_torch_selective import saves, selective
from tests.conformance.torchs import leaf

aten = torch.ops.aten


def counts_of_graphs(fn, *args, check=True, **options):
    """The ops of the forward graph and of the backward graph, by name; values and gradients are eager's."""
    graphs = []

    def compiler(graph, _):
        graphs.append(ops(graph))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, **options)
    leaves = [a.detach().clone().requires_grad_() for a in args]
    others = [a.detach().clone().requires_grad_() for a in args]
    got, expected = (gradients_of(f, x) for f, x in ((compiled(fn, backend), leaves), (fn, others)))
    if check:
        torch.testing.assert_close(got, expected)
    return graphs


def gradients_of(fn, leaves):
    torch.manual_seed(0)
    out = fn(*leaves)
    return out, torch.autograd.grad(torch.stack([t.sum() for t in pytree.tree_leaves(out)]).sum(), leaves)


def dots_of_graphs(fn, *args):
    """The products of the forward graph and of the backward graph."""
    return tuple(dots(graph) for graph in counts_of_graphs(fn, *args))


def gn(x, y):
    return torch.sigmoid(torch.matmul(x, y))


def twice(x, y):
    return torch.sigmoid(torch.matmul(torch.matmul(x, y), y)) * y


class GN(nn.Module):
    def forward(self, x, y):
        return gn(x, y)


TAGS = {
    "test_tags_function": (lambda x, y: checkpoint(gn, torch.sin(x), y, use_reentrant=True), (1, 3)),
    "test_tags_function_with_kwargs": (lambda x, y: checkpoint(gn, torch.sin(x), y=y), (1, 3)),
    "test_tags_multiple_checkpoints": (
        lambda x, y: checkpoint(gn, torch.sin(checkpoint(gn, torch.sin(x), y)), y),
        (2, 6),
    ),
    "test_tags_module": (lambda x, y: checkpoint(GN(), torch.sin(x), y), (1, 3)),
    "test_compile_selective_checkpoint_must_recompute": (
        lambda x, y: (
            checkpoint(lambda x: torch.cos(torch.sin(x @ x @ x)), x, context_fn=selective(saves())) + y
        ),
        (2, 6),
    ),
    "test_compile_selective_checkpoint_must_not_recompute_gemm": (
        lambda x, y: checkpoint(twice, x, y, context_fn=selective(saves(aten.mm.default))),
        (2, 4),
    ),
}


@row("pass", "1 product forward, 3 backward", name="test_tags_function")
@row(
    "pass",
    "2 and 6",
    name="""
        test_tags_multiple_checkpoints test_compile_selective_checkpoint_must_recompute""",
)
@row("pass", "2 and 4", name="test_compile_selective_checkpoint_must_not_recompute_gemm")
@COMPILES
@pytest.mark.parametrize("name", TAGS)
def test_tags(name):
    fn, dots = TAGS[name]
    assert dots_of_graphs(fn, leaf(4, 4), leaf(4, 4)) == dots


@row("adapted", "the second pass draws what the first drew")
@COMPILES
def test_tags_recomputed_rand():
    x = torch.ones(4, requires_grad=True)
    compiled = torch.compile(
        lambda x: checkpoint(lambda x: (torch.rand_like(x) * x).sin(), x), backend="aot_eager", fullgraph=True
    )
    out = compiled(x)
    drawn = out.detach().asin()
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], drawn * drawn.cos())


@row("adapted", "the same")
@COMPILES
def test_tags_dropout():
    x = torch.ones(64, requires_grad=True)
    compiled = torch.compile(
        lambda x: checkpoint(lambda x: torch.dropout(x, 0.5, True).sin(), x),
        backend="aot_eager",
        fullgraph=True,
    )
    out = compiled(x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0] != 0, out != 0) and 0 < (out != 0).sum() < 64


@row("refused on purpose", "contexts of one's own do not run in compiled code")
@COMPILES
def test_compile_selective_checkpoint_invalid_context():

    class Invalid:
        def __enter__(self):
            return self

        def __exit__(self, *exc):
            return None

    fn = torch.compile(
        lambda x, y: checkpoint(gn, x, y, context_fn=lambda: (Invalid(), Invalid())), backend="aot_eager"
    )
    with pytest.raises(Exception, match="context"):
        fn(leaf(4, 4), leaf(4, 4))


@row("adapted", "a function in the partial; of an object with `__call__` Dynamo makes no constant")
@COMPILES
def test_sac_with_partial_context_fn():
    policy = functools.partial(create_selective_checkpoint_contexts, always)
    fn = lambda x, y: checkpoint(twice, x, y, context_fn=policy)  # noqa: E731
    assert dots_of_graphs(fn, leaf(4, 4), leaf(4, 4)) == (2, 4)


def always(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE
