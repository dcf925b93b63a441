"""One choice of every class within a budget: the multiple-choice knapsack problem."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from remat.plan.solve.choices import undominated

# Labels kept at a time by the first, quick search.
_BEAM = 64

# Bytes and price so far, the label before, and the choice taken last.
Label = tuple[int, int, "Label | None", int]


@dataclass(frozen=True)
class Packed:
    """The choice taken of each class (None where there is none at that price) and a bound on all prices."""

    taken: list[int] | None
    lower_bound: float


def pack(
    classes: Sequence[Sequence[tuple[int, int]]],
    budget: float,
    top: int,
    *,
    gap: float,
    labels: float = math.inf,
) -> Packed:
    """The choices `(bytes, price)`, one of each class, of least price within `budget` bytes.

    Args:
        classes: for each the choices, whole numbers, from the fewest bytes to the lowest price.
        budget: bytes of all choices together.
        top: dearer solutions are of no interest.
        gap: how far, as a share of the price, the solution may be from the bound.
        labels: partial solutions looked at before the search gives up; what is proved by then is returned.

    Partial solutions are built class by class, the largest classes first, so that small ones fill what is
    left. One is dropped where another is as small and as cheap, or where the LP bound on the rest says that
    it cannot end within a limit. That limit begins at the LP bound of the whole and grows until it meets a
    solution, so the bound is proved on the way. A first search keeps only the most promising partial
    solutions.

    Sources: M. E. Dyer, N. Kayal, J. Walker, "A branch and bound algorithm for solving the multiple-choice
    knapsack problem", 1984 (the LP bound); D. Pisinger, "A minimal algorithm for the multiple-choice knapsack
    problem", 1995 (labels class by class); R. E. Korf, "Depth-first iterative-deepening", 1985 (the limit).

    Example:
        >>> # Keep (bytes) or run again (price): 3 bytes or 5, twice 2 bytes or 3.
        >>> pack([[(0, 5), (3, 0)], [(0, 3), (2, 0)], [(0, 3), (2, 0)]], 4, 11, gap=0.0)
        Packed(taken=[0, 1, 1], lower_bound=5.0)
    """
    return _Pack(classes, budget, labels).run(top, gap)


class _Pack:
    def __init__(self, classes: Sequence[Sequence[tuple[int, int]]], budget: float, labels: float) -> None:
        # Of equal classes the last ones come first: among equal sums the first choice of the others wins.
        several = (k for k, choices in enumerate(classes) if len(choices) > 1)
        self.order = sorted(several, key=lambda k: (-_spread(classes[k]), tuple(classes[k]), -k))
        self.classes = [classes[k] for k in self.order]
        single = [choices[0] for choices in classes if len(choices) == 1]
        self.start: Label = (sum(b for b, _ in single), sum(c for _, c in single), None, -1)
        self.count, self.budget, self.left = len(classes), budget, labels
        self.rests = _rests(self.classes)

    def run(self, top: int, gap: float) -> Packed:
        base = self.start[1] + _bound(self.rests[0], self.budget - self.start[0])
        # Prices are whole, so the optimum is.
        floor = math.ceil(base - 1e-3) if base < math.inf else top + 1
        best = self.search(top, _BEAM)
        reach = max(gap / 2, 5e-4)
        while floor <= top and (best is None or best[1] > floor * (1 + gap / 2)):
            limit = min(math.ceil(floor * (1 + reach)), top if best is None else best[1] - 1)
            found = self.search(limit)
            if self.left <= 0:
                break
            if found is not None:
                best, floor = found, found[1]
            else:
                floor, reach = limit + 1, 4 * reach
        return Packed(None if best is None else self.taken(best), float(floor))

    def taken(self, label: Label | None) -> list[int]:
        """The choices that led to a label, in the order of the classes."""
        found = [0] * self.count
        for k in reversed(self.order):
            assert label is not None
            found[k], label = label[3], label[2]
        return found

    def search(self, limit: int, beam: int | None = None) -> Label | None:
        """The cheapest solution of price `limit` or less; with `beam` not always."""
        labels = [label for _, label in self.within([self.start], self.rests[0], limit)]
        for choices, rest in zip(self.classes, self.rests[1:], strict=True):
            more = [(s[0] + b, s[1] + c, s, k) for k, (b, c) in enumerate(choices) for s in labels]
            self.left -= len(more)
            if self.left <= 0:
                return None
            bounded = self.within(undominated(more), rest, limit)
            if beam is not None and len(bounded) > beam:
                bounded = sorted(bounded, key=lambda pair: pair[0])[:beam]
            labels = [label for _, label in bounded]
        return min(labels, key=lambda s: (s[1], s[0]), default=None)

    def within(self, labels: list[Label], rest: Rest, limit: int) -> list[tuple[float, Label]]:
        """The labels that may end at `limit` or less, with their bounds; they come by growing bytes."""
        sizes, prices = rest
        last, at = len(sizes) - 1, len(sizes) - 1
        found = []
        for label in labels:
            room = self.budget - label[0]
            while at >= 0 and sizes[at] > room:
                at -= 1
            if at < 0:
                break
            least = label[1] + prices[at]
            if at < last:
                slope = (prices[at + 1] - prices[at]) / (sizes[at + 1] - sizes[at])
                least += (room - sizes[at]) * slope
            # Half a unit for rounding: prices are whole.
            if least <= limit + 0.5:
                found.append((least, label))
        return found


# The LP bound of some classes: bytes and prices at the corners of a convex line.
Rest = tuple[list[int], list[int]]


def _rests(classes: Sequence[Sequence[tuple[int, int]]]) -> list[Rest]:
    """The LP bounds of the classes from each one on: their steps down, steepest first."""
    steps: list[tuple[float, int, int]] = []
    size = price = 0
    found: list[Rest] = [([0], [0])]
    for choices in reversed(classes):
        corners = _corners(choices)
        size, price = size + corners[0][0], price + corners[0][1]
        for (b, c), (further, lower) in zip(corners, corners[1:], strict=False):
            insort(steps, ((lower - c) / (further - b), further - b, lower - c))
        found.append(
            (
                list(accumulate((b for _, b, _ in steps), initial=size)),
                list(accumulate((c for _, _, c in steps), initial=price)),
            )
        )
    return found[::-1]


def _corners(choices: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The corners of the lower convex hull."""
    found: list[tuple[int, int]] = []
    for b, c in choices:
        while len(found) > 1:
            (b0, c0), (b1, c1) = found[-2:]
            if (c1 - c0) * (b - b1) < (c - c1) * (b1 - b0):
                break
            found.pop()
        found.append((b, c))
    return found


def _bound(rest: Rest, room: float) -> float:
    """The LP bound at so many bytes."""
    sizes, prices = rest
    at = bisect_right(sizes, room) - 1
    if at < 0 or at == len(sizes) - 1:
        return math.inf if at < 0 else prices[at]
    slope = (prices[at + 1] - prices[at]) / (sizes[at + 1] - sizes[at])
    return prices[at] + (room - sizes[at]) * slope


def _spread(choices: Sequence[tuple[int, int]]) -> int:
    return choices[-1][0] - choices[0][0]
