"""How long the first call of a large region under a budget plans: traced, priced and solved.

    python -m benchmarks.planner.deep

An unrolled ODE of 3,003 elementwise ops, 750 layers (3,000 ops), and 32 equal layers, each a region.
Seconds are those of this process on the processor: what other processes do there does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from remat import apply, checkpoint_policy

POLICY = checkpoint_policy(budget=0.5)


class Stack(nn.Module):
    """Residual layers of two ops and a product."""

    def __init__(self, layers: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    """One of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.linear(x))


def ode(y: torch.Tensor, w: torch.Tensor, steps: int = 429) -> torch.Tensor:
    """Seven ops a step."""
    for _ in range(steps):
        y = y + 0.01 * torch.tanh(y * w) - 0.001 * y * y
    return y


def seconds(run: Callable[[], Any]) -> float:
    """Of a call, on this thread."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def main() -> None:
    """Print a row for each."""
    x, w = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    POLICY.plan(lambda x: ode(x, w, 3), x)
    rows = torch.randn(16, 32, requires_grad=True)
    print(f"{'region':<28}{'ops':>6}{'seconds':>9}")
    stack: list[Any] = []
    print(f"{'unrolled ODE':<28}{3003:>6}{seconds(lambda: POLICY.plan(ode, x, w)):>9.2f}")
    taken = seconds(lambda: stack.append(POLICY.plan(Stack(750), rows)))
    print(f"{'750 layers':<28}{len(stack[0].ops):>6}{taken:>9.2f}")
    model = apply(Stack(32), policy=POLICY, layers=Layer)
    plain = seconds(lambda: Stack(32)(rows))
    print(f"{'32 equal layers, first call':<28}{32 * 4:>6}{seconds(lambda: model(rows)) - plain:>9.2f}")


if __name__ == "__main__":
    main()
