"""The exact problem as a mixed-integer program, solved by HiGHS through SciPy (an optional dependency)."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from remat.plan.solve.problem import INF, Problem, Solution, complete
from remat.plan.solve.repeats import Repeats

# Whole prices are counted in this share of the dearest op's.
_ROUNDING = 1e-5


def available() -> bool:
    """Whether SciPy can be imported."""
    return importlib.util.find_spec("scipy") is not None


@dataclass(frozen=True)
class Exact:
    """What a search found: the best solution (None where it found none) and the bound it proved."""

    solution: Solution | None
    lower_bound: float


@contextlib.contextmanager
def _stray_output() -> Iterator[None]:
    """HiGHS (in SciPy 1.17) prints a debug line to the process's stdout now and then: let it go to stderr."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:
        # No such streams (a windowed or closed process): nothing to protect.
        yield
        return
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def solve_exactly(
    problem: Problem,
    budget: float,
    *,
    run: Repeats | None = None,
    time_limit: float = 0.5,
    gap: float = 1e-3,
    tie_break: float = 1e-4,
    ceiling: float = INF,
) -> Exact:
    """Least price within `budget` bytes.

    With `run`, its layers are solved as one (see `_layers`): quick, but where the run meets what is around
    it the solution may miss the bound.

    `tie_break` makes late ops up to that share dearer, so that among equals early layers are the ones run
    again: their replay comes when most kept bytes are gone already.

    Where the optimum is tiny beside the dearest op, HiGHS's absolute tolerances hide it: ops that alone cost
    more than the plan in hand cannot be part of a better one, so they are barred and the rest is solved again
    at its own scale. `ceiling` is the price of a plan in hand, where there is one.
    """
    end = time.perf_counter() + time_limit
    search = _Search(problem, budget, gap, tie_break, run)
    best = search.once(ceiling, time_limit)
    dearest = max((c for c in problem.cost if c < INF and c <= ceiling), default=0.0)
    while best.solution is not None and not search.proved(best):
        ceiling, left = best.solution.cost, end - time.perf_counter()
        if ceiling <= 0 or ceiling >= dearest / 4 or left <= 0:
            break
        again = search.once(ceiling, left)
        # What the barred ops could be part of costs more than the plan in hand, which bounds the rest.
        best = better(best, Exact(again.solution, min(again.lower_bound, ceiling)))
        dearest = ceiling
    return best


def better(one: Exact, other: Exact) -> Exact:
    """The cheaper solution of two, the first where they are alike, and the higher bound."""
    floor = max(one.lower_bound, other.lower_bound)
    if one.solution is None or (other.solution is not None and other.solution.cost < one.solution.cost):
        return Exact(other.solution, floor)
    return Exact(one.solution, floor)


@dataclass(frozen=True)
class _Search:
    """What stays the same between attempts."""

    problem: Problem
    budget: float
    gap: float
    tie_break: float
    run: Repeats | None

    def proved(self, found: Exact) -> bool:
        """Whether a solution meets the bound, as far as the tie-break lets it."""
        cost = INF if found.solution is None else found.solution.cost
        return found.lower_bound >= cost * (1 - self.gap - self.tie_break)

    def once(self, ceiling: float, time_limit: float) -> Exact:
        """One attempt with the ops barred that cost more than `ceiling`."""
        return (self._whole if self.run is None else self._layers)(ceiling, time_limit)

    def _layers(self, ceiling: float, time_limit: float) -> Exact:
        """The layers of the run as one: how many of them keep each value, run each op again.

        The sums over layers of a solution meet the sums of its constraints, so the bound holds for the whole
        problem. The other way round, let layer `k` do what at least `k + 1` layers do: that is a solution
        again (all constraints but the budget compare two availabilities), except where the run meets what is
        around it. `complete` mends that; where it costs too much, the ends are tied as tightly as that
        solution needs. Early layers run more again, late ones keep more.

        Source: S. Baum and L. E. Trotter, "Integer rounding and polyhedral decomposition for totally
        unimodular systems", 1978.
        """
        # No tie-break here: equal prices are what lets HiGHS close the gap.
        problem, gap = self.problem, self.gap / 10
        loose = _solve(problem, self.budget, ceiling, time_limit / 2, gap, 0.0, self.run)
        if self.proved(loose) or loose.lower_bound == INF:
            return loose
        tight = _solve(problem, self.budget, ceiling, time_limit / 4, gap, 0.0, self.run, tight=True)
        best = better(loose, Exact(tight.solution, 0.0))
        return best if self.proved(best) else better(best, self._coarse(ceiling, time_limit / 4))

    def _coarse(self, ceiling: float, time_limit: float) -> Exact:
        """With prices rounded down to whole numbers: such a bound holds too, and is often found sooner."""
        dearest = max((c for c in self.problem.cost if c <= ceiling and c < INF), default=0.0)
        unit = dearest * _ROUNDING or 1.0
        prices = tuple(c if c == INF else float(c // unit) for c in self.problem.cost)
        barred = ceiling / unit if ceiling < INF else INF
        rounded = replace(self.problem, cost=prices, keep=tuple(p / unit for p in self.problem.keep))
        found = _solve(rounded, self.budget, barred, time_limit, self.gap, 0.0, self.run)
        real = None if found.solution is None else complete(self.problem, found.solution.saved)
        return Exact(real, found.lower_bound * unit)

    def _whole(self, ceiling: float, time_limit: float) -> Exact:
        """The problem as it is.

        The tie-break hides from HiGHS that layers are alike, so where the proof is not found in a third of
        the time, prices are rounded and left alike.
        """
        first = _solve(self.problem, self.budget, ceiling, time_limit / 3, self.gap, self.tie_break)
        if self.proved(first):
            return first
        second = self._coarse(ceiling, 2 * time_limit / 3)
        best = better(first, second)
        if first.solution is not None and best.solution is not None:
            tied = first.solution.cost <= best.solution.cost * (1 + self.tie_break)
            return Exact(first.solution if tied else best.solution, best.lower_bound)
        return best


def _solve(
    problem: Problem,
    budget: float,
    ceiling: float,
    time_limit: float,
    gap: float,
    tie_break: float,
    run: Repeats | None = None,
    *,
    tight: bool = False,
) -> Exact:
    """One run of HiGHS in which no op of a price above `ceiling` runs again.

    Only the keep decisions are integers: with those fixed, what remains is totally unimodular.
    """
    import numpy
    from scipy.optimize import Bounds, LinearConstraint, milp

    table = Table(problem, run, tight)
    # Whole numbers with half a unit to spare: a plan that meets the budget to the byte is not rounded away.
    unit = math.gcd(*(int(problem.size[v]) for v in table.held)) or 1
    table.row([(("value", v), -problem.size[v] / unit) for v in table.held], -(budget // unit + 0.5))
    cost = numpy.array(
        [min(problem.cost[o], 1e300) for o in table.ops] + [problem.price(v) for v in table.held], dtype=float
    )
    # SciPy's annotations know only the scalar forms of these.
    top: Any = numpy.array([table.times(o) for o in table.ops] + [table.many(v) for v in table.held], float)
    barred = [k for k, o in enumerate(table.ops) if problem.cost[o] == INF or problem.cost[o] > ceiling]
    top[barred], cost[barred] = 0.0, 0.0
    width, count = len(cost), len(table.ops)
    scale = float(cost.max()) if width and cost.max() > 0 else 1.0
    slope = numpy.zeros(width)
    slope[:count] = tie_break * numpy.array(table.ops) / max(len(problem.cost), 1)
    whole = numpy.zeros(width)
    whole[count:] = 1
    floors: Any = numpy.zeros(width)
    least: Any = numpy.array(table.lower)
    with _stray_output():
        result = milp(
            cost / scale * (1 + slope),
            integrality=whole,
            bounds=Bounds(floors, top),
            constraints=LinearConstraint(table.matrix(), least, numpy.inf),
            options={"time_limit": max(time_limit, 0.01), "mip_rel_gap": gap, "presolve": True},
        )
    # Without integer columns HiGHS solves an LP and reports no MIP bound: its optimum is the bound.
    proved = result.fun if result.mip_dual_bound is None and result.status == 0 else result.mip_dual_bound
    floor = 0.0 if proved is None or not numpy.isfinite(proved) else float(proved) * scale / (1 + tie_break)
    if result.x is None:
        return Exact(None, INF if result.status == 2 else floor)
    found = complete(problem, table.chosen([round(x) for x in result.x]))
    return Exact(found if found is not None and found.bytes <= budget else None, floor)


class Table:
    """Columns and rows of the program: one column for each op and each value that may be kept.

    With a run of equal layers, the ops and values of its first layer stand for those of all and are counted.
    """

    def __init__(self, problem: Problem, run: Repeats | None, tight: bool) -> None:
        self.problem, self.run, self.tight = problem, run, tight
        stands = {run.represents(v) for v in problem.relevant} if run else problem.relevant
        values = sorted(v for v in stands if not problem.free(v))
        self.ops = sorted({problem.producer[v] for v in stands})
        self.held = [v for v in values if problem.size[v] < INF]
        self.column = {("op", o): k for k, o in enumerate(self.ops)}
        self.column |= {("value", v): len(self.ops) + k for k, v in enumerate(self.held)}
        self.entries: list[tuple[int, int, float]] = []
        self.lower: list[float] = []
        for value in problem.need & frozenset(values):
            self.row(self.there(value), self.many(value))
        for op in self.ops:
            if problem.cost[op] < INF:
                self.reads(op)

    def times(self, op: int) -> int:
        """How many ops a column stands for."""
        return self.run.count if self.run and self.run.inside(op) else 1

    def many(self, value: int) -> int:
        """The same for a value."""
        return self.times(self.problem.producer[value])

    def there(self, value: int) -> list[tuple[tuple[str, int], float]]:
        """The terms that say whether (or in how many layers) a value is there."""
        stand = self.run.represents(value) if self.run else value
        return [(("op", self.problem.producer[stand]), 1.0), (("value", stand), 1.0)]

    def row(self, terms: Iterable[tuple[tuple[str, int], float]], least: float) -> None:
        """One constraint: the sum of the terms is at least so much."""
        number = len(self.lower)
        self.entries += [(number, self.column[key], x) for key, x in terms if key in self.column]
        self.lower.append(least)

    def reads(self, op: int) -> None:
        """An op runs again only where all that it reads is there."""
        run, again = self.run, [(("op", op), -1.0)]
        if run is None or not run.inside(op):
            for value in self.problem.reads[op]:
                if not self.problem.free(value):
                    self.row(again + self.there(value), 0.0)
            return
        common, own = run.ties[op]
        for value in common:
            self.row(again + [(key, float(run.count)) for key, _ in self.there(value)], 0.0)
        for value in own:
            self.row(again + self._chain(op, value, run), 0.0)

    def _chain(self, op: int, value: int, run: Repeats) -> list[tuple[tuple[str, int], float]]:
        """What all layers together have of what each reads: its own, or that of a layer before.

        In the latter case the layer behind the run reads of the run too, and the first ones of what is
        before it.
        """
        terms, layer = [], 0
        before, behind = value, ("op", op + run.count * run.period)
        while not run.inside(self.problem.producer[before]):
            if self.tight:
                ahead = [(key, float(run.count)) for key, _ in self.there(before)]
                self.row([(("op", op), -1.0), *ahead], 0.0)
            terms += self.there(before)
            layer += 1
            before = run.shifted(value, layer)
        if layer:
            terms.append((behind, -1.0))
            if self.tight:
                self.row([(behind, -float(run.count)), *self.there(before)], 0.0)
        return terms + self.there(before)

    def chosen(self, result: list[int]) -> set[int]:
        """The values kept, layer by layer."""
        found = set()
        for value in self.held:
            op = self.problem.producer[value]
            kept, again = result[self.column["value", value]], result[self.column["op", op]]
            if self.run is None or not self.run.inside(op):
                found |= {value} if kept > 0 else set()
                continue
            found |= {self.run.shifted(value, k) for k in range(again, min(again + kept, self.run.count))}
        return found

    def matrix(self) -> Any:
        """The rows as a sparse matrix."""
        from scipy.sparse import coo_array

        rows, columns, entries = zip(*self.entries, strict=True) if self.entries else ((), (), ())
        return coo_array((entries, (rows, columns)), shape=(len(self.lower), len(self.column))).tocsr()
