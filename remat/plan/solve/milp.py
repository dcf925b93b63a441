"""The exact problem as a mixed-integer program, solved by HiGHS through SciPy (an optional dependency)."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from remat.plan.solve.problem import INF, Problem, Solution, complete


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
    """HiGHS (in SciPy 1.17) prints a debug line to the process's stdout now and then."""
    sys.stdout.flush()
    try:
        kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
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
    nodes: int = 1000,
    gap: float = 1e-3,
    ceiling: float = INF,
) -> Exact:
    """Least price within `budget` bytes, by one run of HiGHS that looks at so many nodes at most.

    Only the keep decisions are integers: with those fixed, what remains is totally unimodular. `ceiling` is
    the price of a plan in hand, where there is one: ops that alone cost more cannot be part of a better one.
    They are barred, for beside them HiGHS's absolute tolerances would hide a small optimum.
    """
    import numpy
    from scipy.optimize import Bounds, LinearConstraint, milp

    ops = sorted({problem.producer[v] for v in problem.relevant})
    held = sorted(v for v in problem.relevant if problem.size[v] < INF and not problem.free(v))
    # SciPy's annotations know only the scalar forms of these.
    top: Any = numpy.ones(len(ops) + len(held))
    cost = numpy.array([problem.cost[o] for o in ops] + [0.0] * len(held), dtype=float)
    barred = [k for k, o in enumerate(ops) if problem.cost[o] == INF or problem.cost[o] > ceiling]
    top[barred], cost[barred] = 0.0, 0.0
    scale = float(cost.max()) if len(cost) and cost.max() > 0 else 1.0
    whole = numpy.array([0] * len(ops) + [1] * len(held))
    matrix, least = _rows(problem, budget, ops, held)
    with _stray_output():
        result = milp(
            cost / scale,
            integrality=whole,
            bounds=Bounds(numpy.zeros_like(top), top),
            constraints=LinearConstraint(matrix, least, numpy.inf),
            options={"node_limit": nodes, "mip_rel_gap": gap, "presolve": True},
        )
    # Without integer columns HiGHS solves an LP and reports no MIP bound: its optimum is the bound.
    proved = result.fun if result.mip_dual_bound is None and result.status == 0 else result.mip_dual_bound
    floor = 0.0 if proved is None or not numpy.isfinite(proved) else float(proved) * scale
    if result.x is None:
        return Exact(None, INF if result.status == 2 else floor)
    found = complete(problem, (v for v, kept in zip(held, result.x[len(ops) :], strict=True) if kept > 0.5))
    return Exact(found if found is not None and found.bytes <= budget else None, floor)


def _rows(problem: Problem, budget: float, ops: list[int], held: list[int]) -> tuple[Any, Any]:
    """The constraints, one column for each op and each value that may be kept: rows, and what each is at
    least."""
    import numpy
    from scipy.sparse import coo_array

    again = {o: k for k, o in enumerate(ops)}
    kept = {v: len(ops) + k for k, v in enumerate(held)}
    rows: list[list[tuple[int, float]]] = []
    least: list[float] = []

    def there(value: int) -> list[tuple[int, float]]:
        columns = again[problem.producer[value]], kept.get(value)
        return [(column, 1.0) for column in columns if column is not None]

    for value in sorted(problem.need):
        if not problem.free(value):
            rows.append(there(value))
            least.append(1.0)
    for op in ops:
        for value in problem.reads[op] if problem.cost[op] < INF else ():
            if not problem.free(value):
                rows.append([(again[op], -1.0), *there(value)])
                least.append(0.0)
    # Whole numbers with half a unit to spare: a plan that meets the budget to the byte is not rounded away.
    unit = math.gcd(*(int(problem.size[v]) for v in held)) or 1
    rows.append([(kept[v], -problem.size[v] / unit) for v in held])
    least.append(-(budget // unit + 0.5))
    entries = [(number, column, x) for number, row in enumerate(rows) for column, x in row]
    at, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
    shape = len(rows), len(ops) + len(held)
    return coo_array((values, (at, columns)), shape=shape).tocsr(), numpy.array(least)
