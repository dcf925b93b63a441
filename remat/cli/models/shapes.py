"""What every model of the command line is: its sizes, its parameters and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from remat.cli.errors import UsageError
from remat.transforms import map_only

Params = dict[str, Any]
# What a row of the sweep puts around each block: `wrap(block)` behaves as `block`.
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
VOCAB = 256


@dataclass(frozen=True)
class Sizes:
    """Depth and width of the model, heads of its attention, positions of a sequence."""

    depth: int
    width: int
    heads: int
    seq: int

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.heads, self.seq) < 1 or self.width % (2 * self.heads):
            raise UsageError(
                f"depth, width, heads and seq must be positive and width a multiple of 2 * heads, but got "
                f"depth={self.depth}, width={self.width}, heads={self.heads}, seq={self.seq}"
            )


def fresh(params: Params) -> Params:
    """Leaves of their own that require gradients and share the numbers of `params`."""
    return map_only(Tensor, lambda t: t.detach().requires_grad_(), params)


@dataclass(frozen=True)
class Model:
    """Parameters, and `loss(params, tokens, wrap)`: mean cross entropy of tokens, int64 [..., seq + 1].

    `leaves(params)` are what `loss` is given where `.backward()` is to leave gradients behind.
    """

    params: Params
    loss: Callable[[Params, Tensor, Wrap], Tensor]
    leaves: Callable[[Params], Params] = fresh
