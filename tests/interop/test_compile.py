"""Calls shaped like torch.utils.checkpoint's, in code that torch.compile compiles."""

import functools
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.func import grad, vmap
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from remat import debug, nn, save_nothing
from remat.interop import checkpoint
from tests.helpers import crossed
from tests.interop.test_checkpoint import (
    W,
    X,
    aten,
    block,
    every_second,
    matmuls,
    recomputed,
    selective,
    stack,
)

CONTEXTS = {
    "function": selective(matmuls),
    "list": selective([aten.mm.default]),
    "lambda": lambda: create_selective_checkpoint_contexts([aten.mm.default]),
    "counting": every_second,
}


@pytest.mark.parametrize(("context", "mode"), crossed(CONTEXTS, ["backward", "grad", "vmap grad"]))
def test_selective_contexts_in_compiled_code(context, mode):
    context_fn = CONTEXTS[context]
    """As torch's own, but also under torch.func, and with the graph of the eager policy."""
    torch._dynamo.reset()
    region = functools.partial(checkpoint, block, use_reentrant=False, context_fn=context_fn)

    def of(run):
        if mode == "backward":
            return lambda x: run(x, W)
        inner = grad(lambda x: run(x, W).sum())
        return inner if mode == "grad" else lambda x: vmap(inner)(x[:, None])

    compiled = torch.compile(of(region), backend="aot_eager", fullgraph=True)
    if mode == "backward":
        torch.testing.assert_close(recomputed(compiled, X)[1], recomputed(of(block), X)[1])
        (found,) = debug.recomputed(of(region), X.clone().requires_grad_())
        assert found.ops["mm"] == (context_fn is every_second) and not found.lost
    else:
        torch.testing.assert_close(compiled(X), of(block)(X))


def test_other_contexts_in_compiled_code_are_refused():
    region = functools.partial(checkpoint, block, context_fn=lambda: (nullcontext(), nullcontext()))
    with pytest.raises(
        BackendCompilerFailed, match="expected what create_selective_checkpoint_contexts makes"
    ):
        torch.compile(region, backend="aot_eager", fullgraph=True)(X.clone().requires_grad_(), W)


@pytest.mark.slow
def test_layers_that_were_made_regions_in_compiled_code():
    model = nn.apply(stack(), layers=torch.nn.Linear, policy=save_nothing)
    assert nn.regions(model)
    expected = recomputed(model, X)[1]
    torch._dynamo.reset()
    torch.testing.assert_close(
        recomputed(torch.compile(model, backend="aot_eager", fullgraph=True), X)[1], expected
    )
    assert len(debug.recomputed(model, X.clone().requires_grad_())) == len(nn.regions(model))
