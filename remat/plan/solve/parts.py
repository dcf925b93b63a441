"""The exact problem part by part: the choices of each, then one of every part within the budget.

In most models what the backward needs separates ops so well that the parts are a few ops each, and equal in
every layer. What remains is a knapsack, which is solved to proven optimality in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from remat.plan.solve.choices import Choice, States
from remat.plan.solve.hull import bound
from remat.plan.solve.knapsack import pack
from remat.plan.solve.milp import Exact, better
from remat.plan.solve.problem import INF, Problem, Solution, complete
from remat.plan.solve.reduce import contract
from remat.plan.solve.split import Part, split

# Prices are counted in units so small that rounding all of them takes up to this share of the gap.
_ROUNDING = 0.5


def solve_parts(
    problem: Problem,
    budget: float,
    corners: list[Solution],
    *,
    ceiling: float = INF,
    gap: float = 1e-3,
    labels: float = INF,
) -> Exact | None:
    """Least price within `budget` bytes, or None where a part is too tangled for this way.

    Args:
        problem: one made by `reduce` or `contract`.
        budget: bytes that may be kept.
        corners: those of the hull on both sides of the budget, at least.
        ceiling: the price of a plan in hand: a dearer one is of no interest.
        gap: how far, as a share of the price, the solution may be from the bound.
        labels: how much is looked at before the search gives up (see `pack`). That is not counted in
            seconds, so that a plan does not depend on how busy the machine is.

    Prices are rounded down to whole units, which bounds from below too; ops that alone cost more than the
    plan in hand are barred. Small prices become nothing, so that more can be contracted. Where the solution
    is far cheaper than the plan in hand, it is looked for again with units as small as it needs.
    """
    inside = max((c for c in corners if c.bytes <= budget), key=lambda c: c.bytes)
    best, ceiling = Exact(inside, bound(corners, budget)), min(ceiling, inside.cost)
    if ceiling <= best.lower_bound:
        return best
    ahead = min((c for c in corners if c.bytes > budget), key=lambda c: c.bytes)
    search = _Search(problem, budget, inside, ahead, best.lower_bound, gap, labels)
    while True:
        found = search.below(ceiling)
        if found is None:
            return None
        best = better(best, found)
        cost = ceiling if best.solution is None else min(ceiling, best.solution.cost)
        if best.lower_bound >= cost * (1 - gap) or cost > ceiling / 2:
            return best
        ceiling = cost


@dataclass(frozen=True)
class _Search:
    """What stays the same between attempts: the corners on both sides of the budget, the hull's bound."""

    problem: Problem
    budget: float
    inside: Solution
    ahead: Solution
    floor: float
    gap: float
    labels: float

    def below(self, ceiling: float) -> Exact | None:
        """The best solution cheaper than `ceiling`, in units that fit that price."""
        problem = self.problem
        count = sum(0 < c <= ceiling for c in (*problem.cost, *problem.keep))
        unit = max(self.floor, ceiling / 100) * max(self.gap, 1e-6) * _ROUNDING / max(count, 1)
        rounded = replace(
            problem,
            cost=tuple(INF if c > ceiling else float(c // unit) for c in problem.cost),
            keep=tuple(float(c // unit) for c in problem.keep),
        )
        smaller = contract(rounded)
        # One more for rounding: no solution cheaper than the plan in hand is left out.
        top = int(ceiling / unit) + 1
        classes = self._classes(split(smaller.problem), unit, top)
        if classes is None:
            return None
        if not all(choices for choices, _ in classes):
            return Exact(None, ceiling)
        points = [[(c.bytes, c.cost) for c in choices] for choices, _ in classes]
        packed = pack(points, self.budget, top, gap=self.gap, labels=self.labels)
        floor = min(packed.lower_bound * unit, ceiling)
        if packed.taken is None:
            return Exact(None, floor)
        taken = ((choices[k], place) for k, (choices, place) in zip(packed.taken, classes, strict=True))
        saved = {place[v] for choice, place in taken for v in choice.kept}
        solution = complete(problem, smaller.original(saved))
        assert solution is not None and solution.bytes <= self.budget
        return Exact(solution, min(floor, solution.cost))

    def _classes(
        self, parts: list[Part], unit: float, top: int
    ) -> list[tuple[list[Choice], tuple[int, ...]]] | None:
        """For each part its choices and the numbers of its values, in the order of the problem.

        A choice is left out if it ends above `top` even with the best ones of all other parts. Prices and
        bytes are compared at the hull's exchange rate.
        """
        price = self.ahead.bytes - self.inside.bytes
        byte = max(int((self.inside.cost - self.ahead.cost) / unit), 1)
        tables = [States(part.problem) for part in parts]
        if any(states.table is None for states in tables):
            return None
        least = [states.least(price, byte)[0].get(0, 0) for states in tables]
        total = sum(len(part.places) * low for part, low in zip(parts, least, strict=True))
        allowance = price * top + byte * int(self.budget) - total
        found = []
        for part, states in zip(parts, tables, strict=True):
            choices = states.choices(price, byte, allowance)
            if choices is None:
                return None
            found += [(choices, place) for place in part.places]
        return sorted(found, key=lambda pair: pair[1])
