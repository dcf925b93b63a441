"""torch's own tests of checkpointing where forward and backward are one graph: see test_torch_tags.py.

Of test/dynamo/test_activation_checkpointing.py: steps that take their gradients when compiled, and make_fx.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx

from remat import RematError
from remat.interop import checkpoint
from tests.compiled import compiled, ops
from tests.conformance.rows import row
from tests.conformance.test_torch_compiled import MM, fresh, pytestmark, region  # noqa: F401
from tests.conformance.test_torch_selective import selective
from tests.conformance.torchs import leaf

aten = torch.ops.aten


# -- forward and backward in one graph ----------------------------------------------------------------


def whole_step(fn, *args):
    """What a step that takes its own gradients returns, and the ops of its one graph."""
    graphs = []

    def compiler(graph, _):
        graphs.append(ops(graph))
        return make_boxed_func(graph.forward)

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        out = compiled(fn, aot_autograd(fw_compiler=compiler, bw_compiler=compiler))(*args)
    (counts,) = graphs
    return out, counts


def gradients(out, args):
    return tuple(g.detach() for g in torch.autograd.grad(out.sum(), args))


@row(
    "pass",
    "4 products, 2 sigmoids in the one graph",
    name="test_ac_rematerialize_simple_forward_backward",
)
@row(
    "pass",
    "the product does not run again",
    name="test_ac_rematerialize_with_selective_checkpoint_policy",
)
@pytest.mark.parametrize(
    ("kept", "counts"),
    [(None, {"mm": 4, "sigmoid": 2}), ([aten.mm.default], {"mm": 3, "sigmoid": 2})],
    ids=["simple_forward_backward", "with_selective_checkpoint_policy"],
)
def test_ac_rematerialize(kept, counts):
    options: dict[str, Any] = {"context_fn": selective(kept)} if kept else {}

    def step(x, y):
        return gradients(checkpoint(lambda a, b: torch.sigmoid(torch.matmul(a, b)), x, y, **options), (x, y))

    x, y = leaf(4, 4), leaf(4, 4)
    got, found = whole_step(step, x, y)
    torch.testing.assert_close(got, step(x, y))
    assert {op: found[op] for op in counts} == counts


@row("adapted", "it draws the same numbers again; torch's raises")
def test_ac_rematerialize_with_rng_ops_raises_error():

    def step(x):
        z = checkpoint(lambda a: torch.sigmoid(a + torch.rand_like(a)), x)
        return z.detach(), torch.autograd.grad(z.sum(), x)[0].detach()

    (z, grad), _ = whole_step(step, leaf(4, 4))
    torch.testing.assert_close(grad, z * (1 - z))


@row(
    "adapted",
    "values and counts, without Inductor's pass",
    name="test_joint_graph_passes_view_optimization",
)
@row("adapted", "the same", name="test_joint_graph_passes_permute_optimization")
@pytest.mark.slow
def test_joint_graph_passes():
    """Views of views, and permutations that undo each other, in a graph that has its own backward."""

    def step(x):
        views = lambda a: torch.sigmoid(a.view(16).view(4, 4).permute(1, 0).permute(1, 0))  # noqa: E731
        return gradients(checkpoint(views, x), (x,))

    x = leaf(4, 4)
    got, found = whole_step(step, x)
    torch.testing.assert_close(got, step(x))
    assert found["sigmoid"] == 2


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return checkpoint(lambda x: self.l2(F.gelu(self.l1(x))), x)


class Chunked(nn.Module):
    """A loss in chunks, each with a backward of its own, and then one through the block."""

    def __init__(self):
        super().__init__()
        self.block, self.head = Mlp(), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x = self.block(x)
        cut, total = x.detach().requires_grad_(), torch.zeros(())
        for start in range(0, 6, 3):
            loss = self.head(cut[start : start + 3]).square().sum()
            loss.backward()
            total = total + loss.detach()
        x.backward(cut.grad)
        return total


class TwoBackwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.block1, self.block2 = Mlp(), Mlp()

    def forward(self, x):
        y = self.block1(x)
        z = self.block2(y)
        z.sum().backward(retain_graph=True)
        y.sum().backward()
        return z.detach()


@row("pass", "2", name="test_chunked_loss_remat")
@row(
    "adapted",
    "right, with 5 of the activation; torch's raises",
    name="test_two_backward_regions_needing_remat_errors",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "gelus"), [(Chunked, 2), (TwoBackwards, 5)], ids=["chunked_loss", "two_backward_regions"]
)
def test_backwards_in_a_graph(kind, gelus):
    """torch refuses the second: two of its regions would have to be computed again."""
    model, x = kind(), leaf(6, 8)

    def run(fn):
        model.zero_grad()
        x.grad = None
        out = fn(x)
        return out, [p.grad.clone() for p in model.parameters()]

    expected = run(model)
    counts = []

    def traced(x):
        out, found = whole_step(model, x)
        counts.append(found["gelu"])
        return out

    torch.testing.assert_close(run(traced), expected)
    assert counts == [gelus]


# -- make_fx, without Dynamo --------------------------------------------------------------------------


def trained(fn):
    """A step's graph, and whether it is right at other numbers."""
    w, x = leaf(4, 4), torch.randn(2, 4)
    step = lambda w, x: torch.autograd.grad(fn(x, w).sum(), w)[0]  # noqa: E731
    graph = make_fx(step)(w, x)
    other = torch.randn(2, 4)
    torch.testing.assert_close(graph(w, other), step(w, other))
    return ops(graph)


@row("pass", "`make_fx`: 3 products, right at other numbers")
def test_checkpoint_traces_through_eager_ac_under_non_strict():
    counts = trained(lambda x, w: checkpoint(lambda x: torch.sin(x @ w), x))
    assert (counts["mm"], counts["sin"]) == (3, 1)


@row("pass", "2")
def test_sac_traces_through_eager_ac_under_non_strict():
    counts = trained(region(lambda x, w: torch.sin(x @ w).exp(), context_fn=MM))
    assert (counts["mm"], counts["sin"]) == (2, 2)


@row("refused on purpose", "torch's graph draws two masks, silently")
def test_checkpoint_with_rng_op_under_non_strict():
    with pytest.raises(RematError, match="make_fx"):
        trained(region(lambda x, w: F.dropout(torch.sin(x @ w), p=0.5)))
