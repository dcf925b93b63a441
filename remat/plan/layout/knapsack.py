"""How many of equal blocks run which plan: the exact trade of bytes for seconds, by Pareto sums.

A sum of a block's plans is worth looking at only where no other one of as few bytes is as fast. Blocks of one
kind differ in nothing, so sums of `n` of them are those of `n - 1` with one plan more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

# More sums than these are thinned out evenly: the result is then optimal to about this share of the bytes.
_MOST = 1 << 14


@dataclass(frozen=True)
class Totals:
    """Pareto sums, by bytes: what they take, what they cost, and what they are made of."""

    bytes: torch.Tensor
    cost: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    def at_most(self, size: float) -> int:
        """The place of the cheapest that takes at most so many bytes, -1 for none."""
        return int((self.bytes <= size).sum()) - 1


def single(bytes: Sequence[int], cost: Sequence[float]) -> Totals:
    """The sums of one block: its plans; `right` tells which."""
    number = torch.arange(len(bytes), device="cpu")
    sizes = torch.tensor(list(bytes), dtype=torch.int64, device="cpu")
    costs = torch.tensor(list(cost), dtype=torch.float64, device="cpu")
    return _pareto(sizes, costs, number, number)


def added(one: Totals, other: Totals) -> Totals:
    """All sums of two, the best of them; `left` and `right` are places in these."""
    size = (one.bytes[:, None] + other.bytes[None]).flatten()
    cost = (one.cost[:, None] + other.cost[None]).flatten()
    left = torch.arange(len(one.bytes), device="cpu").repeat_interleave(len(other.bytes))
    right = torch.arange(len(other.bytes), device="cpu").repeat(len(one.bytes))
    return _pareto(size, cost, left, right)


def _pareto(size: torch.Tensor, cost: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Totals:
    order = torch.argsort(cost, stable=True)
    order = order[torch.argsort(size[order], stable=True)]
    size, cost, left, right = size[order], cost[order], left[order], right[order]
    before = torch.cat(
        (torch.full((1,), torch.inf, dtype=cost.dtype, device="cpu"), cost.cummin(0).values[:-1])
    )
    # Totals of the same costs in another order differ in the last bits.
    keep = (cost < before - 1e-12 * cost.abs()).nonzero().flatten()
    if len(keep) > _MOST:
        keep = keep[torch.linspace(0, len(keep) - 1, _MOST, device="cpu").long()]
    return Totals(size[keep], cost[keep], left[keep], right[keep])


@dataclass
class Repeated:
    """Totals of any number of one block."""

    one: Totals
    rows: list[Totals] = field(default_factory=list)

    def of(self, count: int) -> Totals:
        """The sums of so many blocks, one or more."""
        if not self.rows:
            self.rows.append(self.one)
        while len(self.rows) < count:
            self.rows.append(added(self.rows[-1], self.one))
        return self.rows[count - 1]

    def picks(self, count: int, place: int) -> list[int]:
        """The plans behind one of the sums, the one of the fewest bytes first."""
        found = []
        for row in range(count - 1, 0, -1):
            sums = self.rows[row]
            found.append(int(sums.right[place]))
            place = int(sums.left[place])
        return [int(self.one.right[k]) for k in sorted([*found, place])]
