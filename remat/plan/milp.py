"""The exact problem as a mixed-integer program, solved by HiGHS through SciPy (an optional dependency)."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from remat.plan.problem import INF, Problem, Solution, complete

# Whole prices are counted in this share of the dearest op's.
_ROUNDING = 1e-5


def available() -> bool:
    """Whether SciPy can be imported."""
    return importlib.util.find_spec("scipy") is not None


@dataclass(frozen=True)
class Exact:
    """What HiGHS found: the best solution (None where it found none) and the bound it proved."""

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
    time_limit: float = 0.5,
    gap: float = 1e-3,
    tie_break: float = 1e-4,
    ceiling: float = INF,
) -> Exact:
    """Least price within `budget` bytes.

    `tie_break` makes late ops up to that share dearer, so that among equals early layers are the ones run
    again: their replay comes when most kept bytes are gone already. It also hides from HiGHS that layers are
    alike, so where the proof is not found in a third of the time, prices are rounded down to whole numbers
    and left alike: those bounds hold too, and mostly close at once.

    Where the optimum is tiny beside the dearest op, HiGHS's absolute tolerances hide it: ops that alone cost
    more than the plan in hand cannot be part of a better one, so they are barred and the rest is solved again
    at its own scale. `ceiling` is the price of a plan in hand, where there is one.
    """
    end = time.perf_counter() + time_limit
    best = _either(problem, budget, ceiling, time_limit, gap, tie_break)
    dearest = max((c for c in problem.cost if c < INF and c <= ceiling), default=0.0)
    while best.solution is not None and best.lower_bound < best.solution.cost * (1 - gap - tie_break):
        ceiling = best.solution.cost
        left = end - time.perf_counter()
        if ceiling <= 0 or ceiling >= dearest / 4 or left <= 0:
            break
        again = _either(problem, budget, ceiling, left, gap, tie_break)
        if again.solution is None or again.solution.cost > ceiling:
            break
        best, dearest = again, ceiling
    return best


def _either(
    problem: Problem, budget: float, ceiling: float, time_limit: float, gap: float, tie_break: float
) -> Exact:
    first = _solve(problem, budget, ceiling, time_limit / 3, gap, tie_break)
    if first.solution is None and first.lower_bound == INF:
        return first
    if first.solution is not None and first.lower_bound >= first.solution.cost * (1 - gap - tie_break):
        return first
    dearest = max((c for c in problem.cost if c <= ceiling and c < INF), default=0.0)
    unit = dearest * _ROUNDING or 1.0
    coarse = replace(problem, cost=tuple(c if c == INF else float(c // unit) for c in problem.cost))
    barred = ceiling / unit if ceiling < INF else INF
    second = _solve(coarse, budget, barred, 2 * time_limit / 3, gap, 0.0)
    found = None if second.solution is None else complete(problem, second.solution.saved)
    floor = max(first.lower_bound, second.lower_bound * unit)
    if found is None or (first.solution is not None and first.solution.cost <= found.cost * (1 + tie_break)):
        found = first.solution
    return Exact(found, floor)


def _solve(
    problem: Problem, budget: float, ceiling: float, time_limit: float, gap: float, tie_break: float
) -> Exact:
    """One run of HiGHS in which no op of a price above `ceiling` runs again.

    Only the keep decisions are integers: with those fixed, what remains is totally unimodular.
    """
    import numpy
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    values = sorted(problem.relevant)
    ops = sorted({problem.producer[v] for v in values})
    column = {("op", o): k for k, o in enumerate(ops)}
    free = {v for v in values if problem.free(v)}
    held = [v for v in values if problem.size[v] < INF and v not in free]
    column |= {("value", v): len(ops) + k for k, v in enumerate(held)}

    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    lower: list[float] = []

    def require(value: int, reader: int | None) -> None:
        row = len(lower)
        for key in (("op", problem.producer[value]), ("value", value)):
            if key in column:
                rows.append(row)
                columns.append(column[key])
                entries.append(1.0)
        if reader is not None:
            rows.append(row)
            columns.append(column["op", reader])
            entries.append(-1.0)
        lower.append(1.0 if reader is None else 0.0)

    for value in problem.need - free:
        require(value, None)
    for op in ops:
        if problem.cost[op] < INF:
            for value in set(problem.reads[op]) - free:
                require(value, op)

    width = len(ops) + len(held)
    # Whole numbers with half a unit to spare: a plan that meets the budget to the byte is not rounded away.
    unit = math.gcd(*(int(problem.size[v]) for v in held)) or 1
    if held:
        rows += [len(lower)] * len(held)
        columns += range(len(ops), width)
        entries += [problem.size[v] / unit for v in held]
    lower.append(-numpy.inf)
    upper: Any = numpy.full(len(lower), numpy.inf)
    upper[-1] = budget // unit + 0.5

    cost = numpy.array(
        [min(problem.cost[o], 1e300) for o in ops] + [problem.price(v) for v in held], dtype=float
    )
    top: Any = numpy.ones(width)
    barred = [k for k, o in enumerate(ops) if problem.cost[o] == INF or problem.cost[o] > ceiling]
    top[barred], cost[barred] = 0.0, 0.0
    scale = float(cost.max()) if width and cost.max() > 0 else 1.0
    slope = numpy.zeros(width)
    slope[: len(ops)] = tie_break * numpy.arange(len(ops)) / max(len(ops), 1)
    matrix = coo_array((entries, (rows, columns)), shape=(len(lower), width)).tocsr()
    whole = numpy.zeros(width)
    whole[len(ops) :] = 1
    # SciPy's annotations know only the scalar forms of these.
    floors: Any = numpy.zeros(width)
    rows_least: Any = numpy.array(lower)
    with _stray_output():
        result = milp(
            cost / scale * (1 + slope),
            integrality=whole,
            bounds=Bounds(floors, top),
            constraints=LinearConstraint(matrix, rows_least, upper),
            options={"time_limit": time_limit, "mip_rel_gap": gap, "presolve": True},
        )
    # Without integer columns HiGHS solves an LP and reports no MIP bound: its optimum is the bound.
    proved = result.fun if result.mip_dual_bound is None and result.status == 0 else result.mip_dual_bound
    floor = 0.0 if proved is None or not numpy.isfinite(proved) else float(proved) * scale / (1 + tie_break)
    if result.x is None:
        return Exact(None, INF if result.status == 2 else floor)
    chosen = {v for k, v in enumerate(held) if result.x[len(ops) + k] > 0.5}
    found = complete(problem, chosen)
    return Exact(found if found is not None and found.bytes <= budget else None, floor)
