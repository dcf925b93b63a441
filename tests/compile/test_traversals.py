"""Blocks that one graph traverses twice (pytorch issue 193193): live bytes of compiled code.

Both traversals add to the gradients of the same weights. A kernel that computes both parts at once runs in
the last pull-back, and would hold what the others read until then.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import remat, save_matmuls, save_nothing
from remat.gpu import Simulation, trace
from tests.compile.inside import lowered
from tests.inside import trace_memory

WIDE, ROWS = 64, 512


class Block(nn.Module):
    """With a second argument it looks at that, too. Gradients of biases and norms are sums over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDE), nn.LayerNorm(WIDE)
        self.up, self.down, self.across = (
            nn.Linear(WIDE, 4 * WIDE),
            nn.Linear(4 * WIDE, WIDE),
            nn.Linear(WIDE, WIDE),
        )

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if context is not None:
            x = x + self.across(self.last(x)) * context
        return x + self.down(F.gelu(self.up(self.norm(x))))


def with_context(regions: list[Any], x: Tensor) -> Tensor:
    """Once without and once with the second argument."""
    once, again = x, x
    for region in regions:
        once = region(once)
    for region in regions:
        again = region(again, x)
    return once.square().mean() + again.square().mean()


def in_a_row(regions: list[Any], x: Tensor) -> Tensor:
    """The second traversal goes on from the first."""
    for region in regions * 2:
        x = region(x)
    return x.square().mean()


def simulated(loss: Any, x: Tensor) -> int:
    """The peak of the code that Inductor writes for forward and backward, by the lives of its buffers."""
    traces, _ = trace(loss, (x,), {})
    assert traces.forward is not None and traces.backward is not None
    first = lowered(traces.forward, None, False, False)
    run = Simulation(first, None)
    peak = run.execution.peak
    run.backward(lowered(traces.backward, None, True, False, traces.donated, first.strides))
    return max(peak, run.execution.peak)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("way", "policy"),
    [
        (with_context, save_nothing),
        (in_a_row, save_matmuls),
    ],
)
def test_two_traversals_take_no_more_than_eager(way: Any, policy: Any) -> None:
    torch._dynamo.reset()
    blocks = [Block() for _ in range(3)]
    weights = [p for block in blocks for p in block.parameters()]
    regions = [remat(block, policy=policy) for block in blocks]
    x = torch.randn(ROWS, WIDE)

    def step(mark: Any = None) -> tuple[Tensor, ...]:
        return torch.autograd.grad(way(regions, x), weights, allow_unused=True)

    step()
    eager = trace_memory(step).peak
    assert simulated(lambda x: way(regions, x), x) <= 1.05 * eager
