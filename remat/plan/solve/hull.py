"""The lower convex hull of the exact frontier, by parametric minimum cuts: needs nothing but Python.

For a price of `lam` per byte the relaxed problem is one minimum cut (a closure problem). Its lower envelope
over all `lam` equals the LP relaxation: the constraint matrix without the budget row is totally unimodular.
So the hull certifies a lower bound at every budget, and its corners are optimal.

Sources: J. C. Picard, "Maximal closure of a graph", 1976; M. J. Eisner and D. G. Severance,
"Mathematical techniques for efficient record segmentation in large shared databases", 1976 (the search
for all breakpoints); H. He and S. Yu, "Transcending runtime-memory tradeoffs in checkpointing by being
fusion aware", 2023 (the cut itself).
"""

from __future__ import annotations

from remat.plan.solve.maxflow import Network
from remat.plan.solve.problem import INF, Problem, Solution, complete
from remat.plan.solve.split import split

# Prices become integers of about this total, so that cuts are exact; the rounding is below 1e-12.
_RESOLUTION = 1 << 44


class Cuts:
    """Minimum cuts of one problem at any exchange rate of price and bytes: of each part, equal ones once."""

    def __init__(self, problem: Problem):
        self.problem = problem
        total = sum(c for c in problem.cost if c < INF) or 1.0
        self.scale = _RESOLUTION / total
        self.parts = [(_Cut(part.problem, self.scale), part.places) for part in split(problem)]

    def at(self, price: int, byte: int) -> Solution | None:
        """The minimum of `price * cost + byte * bytes`."""
        saved = ((cut.saved(price, byte), places) for cut, places in self.parts)
        return complete(self.problem, (place[v] for kept, places in saved for place in places for v in kept))

    def extremes(self) -> tuple[Solution, Solution] | None:
        """The solution of least bytes and the one of least price, ties broken by the other measure."""
        most = sum(int(s) for s in self.problem.size if s < INF) + 1
        least = self.at(1, 2 * _RESOLUTION)
        cheap = self.at(most, 1)
        return None if least is None or cheap is None else (least, cheap)


class _Cut:
    """The network of one part."""

    def __init__(self, problem: Problem, scale: float):
        self.problem, self.scale = problem, scale
        self._lay_out()

    def _lay_out(self) -> None:
        """Node 0 is the source (kept), node 1 the sink (must be there); equal nodes are merged.

        A needed value is the sink, and an op that cannot run again is the source. A value that cannot be kept
        is one node with its op. This halves the network of a graph full of views.
        """
        problem = self.problem
        values = sorted(problem.relevant)
        forced = problem.certain
        again = {problem.producer[v] for v in forced if problem.size[v] == INF}
        node: dict[int, int] = {}
        for op in sorted({problem.producer[v] for v in values}):
            node[op] = 1 if op in again else 0 if problem.cost[op] == INF else len(node) + 2
        fresh = len(node) + 2
        place: dict[int, int] = {}
        for value in values:
            if value in forced:
                place[value] = 1
            elif problem.size[value] == INF:
                place[value] = node[problem.producer[value]]
            else:
                place[value], fresh = fresh, fresh + 1
        self.nodes, self.place = fresh, place
        self.run = [(node[o], problem.cost[o]) for o in node if node[o] > 1]
        self.hold = [(node[problem.producer[v]], place[v], v) for v in values if problem.size[v] < INF]
        self.link = {
            (place[v], node[o]) for o in node for v in problem.reads[o] if place[v] != 1 and node[o] != 0
        }

    def saved(self, price: int, byte: int) -> list[int]:
        """What the minimum of `price * cost + byte * bytes` keeps."""
        problem, scale = self.problem, self.scale
        run = [(n, price * round(c * scale)) for n, c in self.run]
        hold = [(a, b, byte * int(problem.size[v])) for a, b, v in self.hold]
        never = sum(c for _, c in run) + sum(c for _, _, c in hold) + 1
        net = Network(self.nodes)
        for n, capacity in run:
            if capacity:
                net.add(0, n, capacity)
        for a, b, capacity in hold:
            if capacity and a != 1:
                net.add(a, b, capacity)
        for a, b in self.link:
            if a != b:
                net.add(a, b, never)
        side = net.source_side(0, 1)
        return [v for a, b, v in self.hold if side[a] and not side[b]]


def hull(problem: Problem, limit: int = 400, around: float | None = None) -> list[Solution]:
    """All corners of the lower convex hull, from the fewest bytes to the lowest price.

    Empty where no choice is feasible (something the backward reads can be neither kept nor made again).
    `limit` bounds the number of cuts. With `around`, only the corners on the way to that many bytes are
    looked for: enough for the bound there, and a handful of cuts.
    """
    cuts = Cuts(problem)
    ends = cuts.extremes()
    if ends is None:
        return []
    corners = {(s.bytes, s.cost): s for s in ends}
    todo = [ends]
    while todo and limit:
        left, right = todo.pop()
        price, byte = right.bytes - left.bytes, round((left.cost - right.cost) * cuts.scale)
        if price <= 0 or byte <= 0:
            continue
        limit -= 1
        middle = cuts.at(price, byte)
        if middle is None or not _below(middle, left, right) or (middle.bytes, middle.cost) in corners:
            continue
        corners[middle.bytes, middle.cost] = middle
        halves = [(left, middle), (middle, right)]
        todo += halves if around is None else [halves[around >= middle.bytes]]
    return [corners[key] for key in sorted(corners)]


def _below(point: Solution, left: Solution, right: Solution) -> bool:
    """Strictly under the segment, beyond rounding."""
    if not left.bytes < point.bytes < right.bytes:
        return False
    return point.cost < bound([left, right], point.bytes) - 1e-9 * max(left.cost, 1e-30)


def bound(corners: list[Solution], budget: float) -> float:
    """The lower bound that the hull proves on the price at this many bytes."""
    if not corners or budget < corners[0].bytes:
        return INF
    for left, right in zip(corners, corners[1:], strict=False):
        if budget < right.bytes:
            share = (budget - left.bytes) / (right.bytes - left.bytes)
            return left.cost + share * (right.cost - left.cost)
    return corners[-1].cost
