"""Memory formats: a region that is called with tensors that lie otherwise than in the call before.

Random numbers are drawn in the order of memory, and a tensor made like another lies as that does. So a mask
that is laid out by an earlier call is another mask.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import checkpoint_policy, remat
from remat.policies import offload, save_matmuls, save_nothing
from tests.helpers import sparse

# Of some programs nothing can be left out.
pytestmark = pytest.mark.filterwarnings("ignore:A budget of 0.5 is below the least")

SHAPE = (2, 4, 6, 6)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


W = numbers(4, 4, 3, 3, seed=1)


def inside(x: Tensor, shape: tuple[int, ...], *cut: slice) -> Tensor:
    """`x` as a part of a larger tensor."""
    return torch.zeros(shape, dtype=x.dtype)[(..., *cut)].copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.mT.contiguous().mT,
    "batch_last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "expanded": lambda x: x[:1].expand(SHAPE),
    "stepped": lambda x: inside(x, (2, 4, 12, 18), slice(None, None, 2), slice(None, None, 3)),
    "offset": lambda x: inside(x, (2, 4, 8, 6), slice(1, 7), slice(None)),
}


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, of which no region has seen a call."""
    code = function.__code__.replace(co_name=f"{function.__name__}_")
    return types.FunctionType(code, function.__globals__, closure=function.__closure__)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def backward(f: Any, x: Tensor, w: Tensor) -> list[Any]:
    x, w = leaves(x, w)
    torch.manual_seed(5)
    out = f(x, w)
    out.square().sum().backward()
    return [out.detach(), x.grad, w.grad]


POLICIES = {
    "nothing": save_nothing,
    "matmuls": save_matmuls,
    "offload": offload(save_matmuls),
    "budget": checkpoint_policy(budget=0.5),
}


# -- where else a layout comes from --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_captured_tensors(policy):
    held = [numbers(*SHAPE)]

    def function(x, w):
        h = held[0].exp()
        return (F.dropout(h, 0.5) * h * x).sin()

    region = remat(function, policy=POLICIES[policy])
    plain = alone(function)
    for name in [*LAYOUTS, *LAYOUTS]:
        held[0] = LAYOUTS[name](numbers(*SHAPE, seed=3))
        x = numbers(*SHAPE)
        assert torch.equal(backward(region, x, W)[1], backward(plain, x, W)[1]), name


def test_model_that_changes_its_memory_format():
    """The arguments lie as before. What the convolution returns does not."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Dropout(0.5), nn.Tanh()).double()
    region = remat(model)
    for memory_format in (torch.contiguous_format, torch.channels_last) * 2:
        model.to(memory_format=memory_format)  # pyright: ignore[reportCallIssue]
        grads = [backward(lambda x, w, f=f: f(x), numbers(*SHAPE), W)[1] for f in (region, model)]
        assert torch.equal(*grads), memory_format


@pytest.mark.parametrize("policy", ["nothing", "matmuls", "offload"])
def test_hooks_that_hand_back_another_layout(policy):
    """As `save_on_cpu(pin_memory=True)` does. On a card dropout is this op."""

    def function(x, w):
        h = F.conv2d(x, w, padding=1)
        return torch.native_dropout(x, 0.5, True)[0].sin() + torch.native_dropout(h, 0.5, True)[0].sin()

    for name in LAYOUTS:
        x, w = leaves(LAYOUTS[name](numbers(*SHAPE)), W)
        grads = []
        for f in (function, remat(alone(function), policy=POLICIES[policy])):
            torch.manual_seed(5)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t):
                out = f(x * 1, w)
            grads.append(torch.autograd.grad(out.square().sum(), (x, w)))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", sparse(["channels_last", "stepped"]))
def test_compiled(name):
    """One region on several layouts in a graph. A function of degree one is its gradient times its argument,
    if both are made with the same mask."""

    @remat
    def block(x):
        return F.dropout(x.relu(), 0.5) * torch.rand_like(x)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x):
        return block(x) + block(x.mT.contiguous().mT) + block(x.mT).mT

    (x,) = leaves(LAYOUTS[name](numbers(*SHAPE)))
    out = step(x).sum()
    (grad,) = torch.autograd.grad(out, x)
    torch.testing.assert_close((grad * x).sum(), out)


# -- what makes no difference is not recorded again ----------------------------------------------------------


def recordings(calls: list[Tensor]) -> int:
    """How many of these calls were recorded: only then a policy is asked."""
    asked = []

    def rule(info: Any) -> bool:
        asked.append(len(asked))
        return False

    def function(x, w):
        return F.dropout(x.sin(), 0.5).exp()

    region = remat(function, policy=checkpoint_policy(rule))
    count = 0
    for x in calls:
        asked.clear()
        got, want = backward(region, x, W), backward(alone(function), x, W)
        assert torch.equal(got[1], want[1])
        count += bool(asked)
    return count


def test_gaps_of_other_widths():
    x = numbers(*SHAPE)
    assert recordings([inside(x, (2, 4, 6, 6 + n), slice(None), slice(n, None)) for n in range(1, 6)]) == 1


def test_strides_of_single_elements():
    odd = torch.empty_strided((1, 5), (77, 1), dtype=torch.float64).copy_(numbers(1, 5))
    assert recordings([numbers(1, 5), odd, numbers(5, 1).t(), numbers(1, 5)]) == 1


def test_layouts_by_turns():
    # "stepped" and "offset" differ in the width of their gaps alone.
    assert recordings([layout(numbers(*SHAPE)) for layout in LAYOUTS.values()] * 3) == len(LAYOUTS) - 1
