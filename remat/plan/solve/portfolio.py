"""The portfolio: exact where SciPy is there, hull and fill where not, never worse than a given plan."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from remat.plan.solve import milp
from remat.plan.solve.hull import bound, hull
from remat.plan.solve.parts import solve_parts
from remat.plan.solve.problem import INF, Problem, Solution, complete, keep_all
from remat.plan.solve.reduce import contract
from remat.transforms import RematError

# Partial solutions that the search part by part looks at in a second.
_LABELS = 1e6


@dataclass(frozen=True)
class Solved:
    """A solution with its certificate.

    Attributes:
        solution: the best one found.
        lower_bound: no plan within the budget costs less (unit of the cost model).
        solver: where the solution came from: "exact", "hull", "fill", "no recomputation", or the name
            of a plan that was handed in.
        seconds: time the search took.
        forgone: by how much a cheaper one was found, and passed over, as prices do not tell so little.
    """

    solution: Solution
    lower_bound: float
    solver: str
    seconds: float
    forgone: float = 0.0

    @property
    def gap(self) -> float:
        """How far from optimal the solution can be at most, as a share of its cost."""
        cost = self.solution.cost
        return max(0.0, (cost - self.lower_bound) / cost) if cost > 0 else 0.0


def solve(
    problem: Problem,
    budget: float,
    *,
    time_limit: float = 0.5,
    gap: float = 1e-3,
    exact: bool = True,
    candidates: Sequence[tuple[str, Iterable[int]]] = (),
) -> Solved:
    """The cheapest solution within `budget` bytes, with a proven bound.

    Args:
        problem: what may be kept and run again.
        budget: bytes that may be kept.
        time_limit: seconds for the exact search, roughly; when it runs out, the gap says what is proven.
        gap: relative gap at which the exact solver may stop.
        exact: look for the optimum; without, the hull and what fills it up are all there is. Parts that are
            too tangled for their own search are left to SciPy's solver, where SciPy is installed.
        candidates: saved sets of other planners by name: the result is never worse than any that fits.

    Raises:
        RematError: where no choice is feasible, or none within the budget (the message gives the least).
    """
    start = time.perf_counter()
    found: list[tuple[str, Solution]] = []
    everything = keep_all(problem)
    if everything is not None and everything.bytes <= budget:
        found.append(("no recomputation", everything))
    rivals = [
        (name, s) for name, saved in candidates if (s := complete(problem, saved)) and s.bytes <= budget
    ]
    floor = 0.0
    if not found or found[0][1].cost > 0:
        smaller = contract(problem)
        search = _Search(smaller.problem, budget, start, time_limit, gap)
        ceiling = min((s.cost for _, s in (*found, *rivals)), default=INF)
        for name, solution in search.run(exact, ceiling):
            whole = complete(problem, smaller.original(solution.saved))
            assert whole is not None
            found.append((name, whole))
        floor = search.floor
    name, best = min([*found, *rivals], key=lambda pair: (pair[1].cost, pair[1].bytes))
    return Solved(best, min(floor, best.cost), name, time.perf_counter() - start)


def in_doubt(
    solved: Solved, problem: Problem, accuracy: float, rivals: Iterable[tuple[str, Solution]]
) -> Solved:
    """The cheapest of the rivals, which fit, where the solution saves less over it than prices can tell.

    The bound stays as proven.
    """
    name, best = min(rivals, key=lambda pair: (pair[1].cost, pair[1].bytes), default=("", solved.solution))
    forgone = best.cost - solved.solution.cost
    if not 0 < forgone < margin_of(problem, accuracy):
        return solved
    return Solved(best, solved.lower_bound, name, solved.seconds, forgone)


def margin_of(problem: Problem, accuracy: float) -> float:
    """What prices do not tell: their accuracy is a share of a step, which takes about three forwards."""
    return 3 * accuracy * sum(cost for cost in problem.cost if cost < INF)


class _Search:
    """Hull, part by part, the whole program: in that order, until the proof is there."""

    def __init__(self, problem: Problem, budget: float, start: float, limit: float, gap: float) -> None:
        self.problem, self.budget, self.gap = problem, budget, gap
        self.end, self.labels = start + limit, limit * _LABELS
        self.floor = 0.0
        self.found: list[tuple[str, Solution]] = []

    def run(self, exact: bool, ceiling: float) -> list[tuple[str, Solution]]:
        """All solutions found, by the name of what found them; `floor` is the bound.

        `ceiling` is the price of a plan in hand: ops that alone cost more need not be looked at.
        """
        corners = hull(self.problem, around=self.budget)
        check_feasible(corners, self.budget)
        self.floor = bound(corners, self.budget)
        inside = max((c for c in corners if c.bytes <= self.budget), key=lambda c: c.bytes)
        self.found.append(("hull", inside))
        ceiling = min(ceiling, inside.cost)
        if exact and ceiling > self.floor:
            self._by_parts(corners, ceiling)
        if exact and milp.available() and not self._proved(ceiling):
            self._exactly(min(ceiling, *(s.cost for _, s in self.found)))
        if min(ceiling, *(s.cost for _, s in self.found)) > self.floor and len(self.found) == 1:
            self.found.append(("fill", fill(self.problem, corners, self.budget)))
        return self.found

    def _proved(self, ceiling: float) -> bool:
        return self.floor >= min(ceiling, *(s.cost for _, s in self.found)) * (1 - self.gap)

    def _by_parts(self, corners: list[Solution], ceiling: float) -> None:
        result = solve_parts(
            self.problem, self.budget, corners, ceiling=ceiling, gap=self.gap, labels=self.labels
        )
        if result is None:
            return
        self._take(result.solution, min(result.lower_bound, ceiling))
        if result.solution is not None and (lighter := self._lighter(result.solution)) is not None:
            self.found.append(("exact", lighter))

    def _lighter(self, best: Solution) -> Solution | None:
        """The same choice of dear ops with fewer of the cheap ones, whose prices are lost in the gap."""
        problem, cost = self.problem, self.problem.cost
        light = self.gap * best.cost / max(len(best.replayed), 1)
        if not any(0 < cost[o] <= light for o in best.replayed):
            return None
        settled = tuple(c if c <= light else 0.0 if o in best.replayed else INF for o, c in enumerate(cost))
        smaller = contract(replace(problem, cost=settled))
        corners = hull(smaller.problem, around=self.budget)
        found = solve_parts(smaller.problem, self.budget, corners, gap=self.gap, labels=self.labels)
        if found is None or found.solution is None:
            return None
        return complete(problem, smaller.original(found.solution.saved))

    def _take(self, solution: Solution | None, bound: float) -> None:
        self.floor = max(self.floor, bound)
        if solution is not None:
            self.found.append(("exact", solution))

    def _exactly(self, ceiling: float) -> None:
        left = max(self.end - time.perf_counter(), 0.02)
        result = milp.solve_exactly(self.problem, self.budget, time_limit=left, gap=self.gap, ceiling=ceiling)
        self._take(result.solution, min(result.lower_bound, ceiling))


def check_feasible(corners: list[Solution], budget: float) -> None:
    """Raise what a user can act on where the budget is out of reach."""
    if not corners:
        raise RematError(
            "The backward reads a value that can be neither kept nor recomputed. An op that must not run "
            "twice made it inside an in-place chain. Keep that op out of the region, or write out of place."
        )
    if budget < corners[0].bytes:
        share = (
            f" (An int is bytes; for {budget:.0f} % write budget={budget / 100}.)" if budget <= 100 else ""
        )
        raise RematError(
            f"A budget of {int(budget):,} bytes cannot be met. At least {corners[0].bytes:,} bytes must be "
            "kept: the region's own inputs, and results of ops that must not run twice. "
            f"Write budget={corners[0].bytes} or more.{share}"
        )


def least(problem: Problem) -> Solution:
    """The solution with the fewest kept bytes, and among those the cheapest."""
    from remat.plan.solve.hull import Cuts

    ends = Cuts(problem).extremes()
    check_feasible([] if ends is None else [ends[0]], float("inf"))
    assert ends is not None
    return ends[0]


def fill(problem: Problem, corners: list[Solution], budget: float) -> Solution:
    """From the last corner within the budget towards the next one, piece by piece.

    Two neighbouring corners differ in independent pieces (one a layer, in a deep model); the pieces of
    best price per byte are taken while they fit.
    """
    inside = [c for c in corners if c.bytes <= budget]
    base = inside[-1]
    if len(inside) == len(corners):
        return base
    goal = corners[len(inside)]
    best = base
    ranked = []
    for piece in _pieces(problem, base.saved ^ goal.saved, base.replayed ^ goal.replayed):
        moved = complete(problem, base.saved ^ piece)
        if moved is not None and moved.cost < base.cost:
            ranked.append(((base.cost - moved.cost) / max(moved.bytes - base.bytes, 1), sorted(piece)))
    for _, piece in sorted(ranked, key=lambda pair: (-pair[0], pair[1])):
        moved = complete(problem, best.saved ^ frozenset(piece))
        if moved is not None and moved.bytes <= budget and moved.cost < best.cost:
            best = moved
    return best


def _pieces(problem: Problem, values: frozenset[int], ops: frozenset[int]) -> list[frozenset[int]]:
    """The changed values grouped by connection through changed ops and values."""
    parent: dict[tuple[str, int], tuple[str, int]] = {}

    def root(key: tuple[str, int]) -> tuple[str, int]:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for op in ops:
        for value in (*problem.outputs[op], *problem.reads[op]):
            if problem.free(value):
                continue
            if value in values:
                parent[root(("value", value))] = root(("op", op))
            elif problem.producer[value] in ops:
                parent[root(("op", problem.producer[value]))] = root(("op", op))
    groups: dict[tuple[str, int], set[int]] = {}
    for value in sorted(v for v in values if not problem.free(v)):
        groups.setdefault(root(("value", value)), set()).add(value)
    return [frozenset(g) for g in groups.values()]
