"""Keep, recompute, or send to the host: every value's verdict in one exact plan.

    min   sum cost[o] r[o]
    s.t.  r[producer(v)] + s[v] + h[v] >= 1          v in need
          r[o] <= r[producer(v)] + s[v] + h[v]       v read by o
          sum size[v] s[v] <= budget                 of all regions
          sum size[v] h[v] <= window(region)         of each region
          r, s, h in {0, 1}

A region's window is what its link copies out behind the forward of the next region, and in again behind that
region's backward. What is within it takes no time. Given the windows regions share nothing but the budget. So
each kind of region is solved once, for all bytes at a time: the choices that no other beats in bytes on the
device and price. Then one choice of each region is packed, with a proven bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from remat.plan.solve.choices import States
from remat.plan.solve.problem import INF, Problem, Proven
from remat.plan.solve.reduce import contract
from remat.plan.solve.split import split

# Prices are whole numbers of about this total; a region of more choices at once is given up.
_UNITS, _MOST = 1 << 40, 20_000
# Choices of each region that are packed.
_FEW = 48

# Bytes on the device and on the host, price, and the values that are kept on each.
Label = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]


class _Tangled(Exception):
    """A region has too many choices to look at."""


@dataclass(frozen=True)
class Placed:
    """A choice for one region.

    Attributes:
        device, host: bytes kept there.
        cost: price of what runs again.
        kept, sent: the values on the device and on the host.
    """

    device: int
    host: int
    cost: float
    kept: frozenset[int]
    sent: frozenset[int]


@dataclass(frozen=True)
class Joined(Proven):
    """A choice for each region, with its proof: no choices within the budget cost less than `lower_bound`."""

    regions: tuple[Placed, ...]
    device: int
    cost: float
    lower_bound: float
    seconds: float


def front(
    problem: Problem, window: float, movable: Callable[[int], bool] = lambda value: True
) -> list[Placed]:
    """All choices of a region that no other beats, from the fewest bytes on the device to the lowest price.

    Args:
        problem: the region.
        window: bytes that may go to the host.
        movable: whether a value may go there.

    Empty where a part is too tangled for this way.
    """
    try:
        return _front(problem, window, movable)
    except _Tangled:
        return []


def _front(problem: Problem, window: float, movable: Callable[[int], bool]) -> list[Placed]:
    smaller = contract(problem)
    total = sum(c for c in smaller.problem.cost if c < INF) or 1.0
    unit = total / _UNITS
    whole = replace(
        smaller.problem, cost=tuple(c if c == INF else int(c / unit) for c in smaller.problem.cost)
    )
    ways: list[list[Label]] = []
    for part in split(whole):
        states, known = States(part.problem), dict[tuple[bool, ...], list[Label]]()
        if states.table is None:
            return []
        for place in part.places:
            numbers = [smaller.values[v] for v in place]
            moves = tuple(map(movable, numbers))
            if moves not in known:
                known[moves] = _labels(part.problem, states, window, moves)
            ways.append([_named(label, numbers) for label in known[moves]])
    labels = _joined(ways, window)
    return [Placed(d, h, c * unit, frozenset(kept), frozenset(sent)) for d, h, c, kept, sent in labels]


def _joined(ways: list[list[Label]], window: float) -> list[Label]:
    """Every way to put parts together that no other beats, from the fewest bytes on the device on.

    The largest parts come first: what is left is ever smaller, and so are the bytes on the host that still
    matter. Once all that is left fits into the window, only bytes on the device and price are compared.
    """
    ways.sort(key=lambda labels: -max((d + h for d, h, *_ in labels), default=0))
    further = sum(max((h for _, h, *_ in labels), default=0) for labels in ways)
    found: list[Label] = [(0, 0, 0, (), ())]
    for labels in ways:
        further -= max((h for _, h, *_ in labels), default=0)
        found = _merged(found, labels, window, window - further)
    return found


def _named(label: Label, numbers: Sequence[int]) -> Label:
    """A way of one part, in the numbers of the region."""
    d, h, c, kept, sent = label
    return d, h, c, tuple([numbers[v] for v in kept]), tuple([numbers[v] for v in sent])


def _labels(problem: Problem, states: States, window: float, moves: Sequence[bool]) -> list[Label]:
    """What a part can do, by dynamic programming over its ops."""
    assert states.table is not None
    ahead = states.least(1, 0)
    if 0 not in ahead[0]:
        return []
    fronts: dict[int, list[Label]] = {0: [(0, 0, 0, (), ())]}
    for here, after in zip(states.table, ahead[1:], strict=True):
        following: dict[int, list[Label]] = {}
        for state, found in fronts.items():
            for further, _, price, values in here[state]:
                if further not in after:
                    continue
                for size, moved, kept, sent in _ways(problem, values, moves):
                    following.setdefault(further, []).extend(
                        (d + size, h + moved, c + price, k + kept, s + sent)
                        for d, h, c, k, s in found
                        if h + moved <= window
                    )
        fronts = {state: _thin(found) for state, found in following.items()}
    return fronts.get(0, [])


def _ways(
    problem: Problem, values: tuple[int, ...], moves: Sequence[bool]
) -> Iterable[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """The ways to keep values here or on the host."""
    found: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = [(0, 0, (), ())]
    for value in values:
        size = int(problem.size[value])
        here = [(d + size, h, (*kept, value), sent) for d, h, kept, sent in found]
        there = [(d, h + size, kept, (*sent, value)) for d, h, kept, sent in found]
        found = here + (there if size and moves[value] else [])
    return found


def _merged(labels: list[Label], more: list[Label], window: float, slack: float) -> list[Label]:
    """Every choice of one part with every choice of another; up to `slack` bytes on the host are alike."""
    sums = [
        (d + e, host if host > slack else slack, c + p, host, at, way)
        for way, (e, i, p, _, _) in enumerate(more)
        for at, (d, h, c, _, _) in enumerate(labels)
        if (host := h + i) <= window
    ]
    found = []
    for d, _, c, h, at, way in _thin(sums):
        (_, _, _, kept, sent), (_, _, _, k, s) = labels[at], more[way]
        found.append((d, h, c, kept + k, sent + s))
    return found


Sums = TypeVar("Sums", bound="tuple[int, float, int, *tuple[object, ...]]")


def _thin(labels: list[Sums]) -> list[Sums]:
    """The labels that no other beats in bytes here, bytes there and price."""
    labels.sort()
    # Of those seen so far, which all take no more bytes here: less and less on the host at a higher price.
    prices: list[int] = []
    hosts: list[float] = []
    found: list[Sums] = []
    for label in labels:
        _, host, cost, *_ = label
        at = bisect_right(prices, cost)
        if at and hosts[at - 1] <= host:
            continue
        found.append(label)
        end = at
        while end < len(hosts) and hosts[end] >= host:
            end += 1
        prices[at:end], hosts[at:end] = [cost], [host]
    if len(found) > _MOST:
        raise _Tangled
    return found


def _hull(points: Sequence[Placed]) -> list[Placed]:
    """The corners of the lower convex hull of a front."""
    found: list[Placed] = []
    for p in points:
        while len(found) > 1 and _slope(found[-2], p) >= _slope(found[-2], found[-1]):
            found.pop()
        found.append(p)
    return found


def _slope(one: Placed, other: Placed) -> float:
    """Price spared for each byte from one choice to a larger one."""
    return (one.cost - other.cost) / (other.device - one.device)


def cheapest(fronts: Sequence[Sequence[Placed]], budget: float) -> float:
    """A bound on the price of all choices within `budget`, the LP's; infinite where there are none.

    It takes the steps along all hulls, by price per byte, as far as the bytes last.
    """
    if (left := budget - sum(points[0].device for points in fronts)) < 0:
        return INF
    cost = sum(points[0].cost for points in fronts)
    steps: list[tuple[float, int]] = []
    distinct = {id(points): points for points in fronts}
    corners = {key: _hull(points) for key, points in distinct.items()}
    for points in fronts:
        hull = corners[id(points)]
        steps += [(_slope(a, b), b.device - a.device) for a, b in zip(hull, hull[1:], strict=False)]
    for slope, size in sorted(steps, reverse=True):
        cost -= slope * min(size, left)
        left -= min(size, left)
    return max(cost, 0.0)


def few(points: Sequence[Placed]) -> list[Placed]:
    """The corners of a front, and points between them at even prices: what packing looks at."""
    if len(points) <= _FEW:
        return list(points)
    step = (points[0].cost - points[-1].cost) / _FEW
    found, last = [], float("inf")
    corners = set(map(id, _hull(points)))
    for p in points:
        if id(p) in corners or p.cost <= last - step:
            found.append(p)
            last = p.cost
    return found
