"""torch's own tests of checkpointing in compiled code, continued: graph breaks, side effects, containers.

Of test/dynamo/test_activation_checkpointing.py: see test_torch_tags.py.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn
from torch._dynamo.exc import Unsupported

from remat import nn as remat_nn
from remat.interop import checkpoint
from tests.compiled import compiled
from tests.conformance.rows import row
from tests.conformance.test_torch_compiled import counts_of_graphs, fresh, pytestmark, region  # noqa: F401
from tests.conformance.torchs import leaf
from tests.helpers import sparse


def broken(x, y):
    torch._dynamo.graph_break()
    a = torch.sigmoid(torch.matmul(x, y))
    torch._dynamo.graph_break()
    return torch.cos(a)


@row("pass", "a graph break in a region: it runs in eager")
@pytest.mark.slow
def test_fallback():
    fn = lambda x, y: torch.cos(checkpoint(broken, torch.sin(x), y))  # noqa: E731
    args = leaf(4, 4), leaf(4, 4)
    got = torch.autograd.grad(torch.compile(fn, backend="aot_eager")(*args).sum(), args)
    torch.testing.assert_close(got, torch.autograd.grad(fn(*args).sum(), args))


def test_error_msg():
    with pytest.raises(Unsupported, match="User-inserted graph break"):
        compiled(region(broken))(leaf(4, 4), leaf(4, 4))


@row("pass", "three sizes")
@pytest.mark.slow
def test_symints_location():
    """A second size is another graph, and the third its own."""
    fn = torch.compile(region(lambda x, y: x @ F.dropout(y, 0.5)), backend="aot_eager")
    for size in (4, 5, 6):
        x, y = leaf(size, size), leaf(size, size)
        fn(x, y).sum().backward()
        assert x.grad is not None and y.grad is not None
        assert x.grad.shape == y.grad.shape == (size, size)


def test_list_inputs():
    fn = region(lambda x, ys: (x, [torch.cos(ys[0]), torch.cos(ys[1])]))
    x, y, z = leaf(4, 4), leaf(4, 4), leaf(4, 4)
    torch.testing.assert_close(compiled(fn)(x, [y, z]), fn(x, [y, z]))


def test_return_same_element_twice():
    def gn(x):
        y = torch.sin(x)
        return y, y

    forward, backward = counts_of_graphs(region(gn), leaf(4, 4))
    assert (forward["sin"], backward["cos"]) == (1, 1)


@row("adapted", "`remat.nn.apply_to`")
@pytest.mark.slow
def test_distributed_utils_checkpoint_wrapper():
    class Mod(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.c = nn.Linear(4, 4), 2

        def forward(self, x):
            return torch.cos(self.linear(torch.sin(x))) * self.c

    mod, x = Mod(), leaf(4, 4)
    expected = mod(x)
    remat_nn.apply_to(mod)
    torch.testing.assert_close(compiled(mod)(x), expected)


@row("adapted", "the same")
def test_dynamo_does_not_trace_getattr_as_top_frame():
    lin = nn.Linear(1, 1)
    mod, x = nn.Sequential(lin, lin), torch.randn(1, 1)
    remat_nn.apply_to(mod)
    mod.a = torch.ones(1, 1)  # type: ignore[assignment]
    torch.testing.assert_close(compiled(lambda x: mod(x) * mod.a)(x), mod(x) * mod.a)


@row(
    "refused on purpose",
    "in one graph, by Dynamo, also with torch's switch, which is for torch's operator; across a graph"
    " break the effect happens once",
    name="test_nonlocal_mutation",
)
@row("refused on purpose", "the same", name="test_nonlocal_list_mutation test_nonlocal_list_mutation_hidden")
@pytest.mark.parametrize(
    ("name", "flag"),
    sparse(
        map(
            pytest.param, ["mutation", "list_mutation", "list_mutation_hidden"] * 2, [True] * 3 + [False] * 3
        ),
        6,
    ),
)
def test_nonlocal(name, flag):
    """Refused in one graph, torch's switch or not: Dynamo knows it for its own operator. Outside of graphs,
    and in eager, the effect happens once."""
    found = []

    def gn(x):
        out = x.sin()
        found.append(out)
        return (torch.cos(torch.sin(x @ x)), torch.sin(x)) if name.endswith("hidden") else (out * 2, out)

    def fn(x):
        return region(gn)(x)[0]

    x = leaf(4, 4)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=flag):
        with pytest.raises(Unsupported, match="Unsafe side effect"):
            compiled(fn)(x)
        expected = torch.autograd.grad(fn(x).sum(), x)
        found.clear()
        torch._dynamo.reset()
        got = torch.autograd.grad(torch.compile(fn, backend="aot_eager")(x).sum(), x)
    torch.testing.assert_close(got, expected)
    assert len(found) == 1 and torch.equal(found[0], x.sin())


@pytest.mark.slow
def test_frozen_dataclass_pytree_output():
    @dataclasses.dataclass(frozen=True)
    class InputNode:
        x: torch.Tensor

    @dataclasses.dataclass(frozen=True)
    class OutputNode:
        y: torch.Tensor

    for kind in (InputNode, OutputNode):
        pytree.register_dataclass(kind)
    mlp, x = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4)), leaf(2, 4)
    fn = region(lambda inp: OutputNode(y=mlp(inp.x)))
    out, expected = compiled(fn)(InputNode(x)), fn(InputNode(x))
    assert type(out) is OutputNode
    torch.testing.assert_close(torch.autograd.grad(out.y.sum(), x), torch.autograd.grad(expected.y.sum(), x))


@row("adapted", "the hook runs, in one graph; nothing has to be saved for it")
def test_tags_must_save_tensor_that_has_backward_hook():

    class Mod(nn.Module):
        def __init__(self):
            super().__init__()
            self.submod, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            return self.norm(checkpoint(self.submod, x))

    def hooked(module, args, out):
        out.register_hook(lambda grad: grad * 2)
        return out

    mod, x, weight = Mod(), leaf(4, 4), torch.arange(16.0).view(4, 4)
    (plain,) = torch.autograd.grad((mod(x) * weight).sum(), x)
    mod.submod.register_forward_hook(hooked)
    (got,) = torch.autograd.grad((compiled(mod)(x) * weight).sum(), x)
    torch.testing.assert_close(got, 2 * plain)


@row("pass", "two steps within a recompile limit of 2")
def test_attr_compile_submodules_in_checkpoint_wrapper():
    block = nn.Sequential(*[nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8, bias=False)) for _ in range(3)])
    x = leaf(4, 8)
    expected = torch.autograd.grad(block(x).sum(), x)
    for child in block:
        child.compile(backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(2):
            torch.testing.assert_close(torch.autograd.grad(checkpoint(block, x).sum(), x), expected)
