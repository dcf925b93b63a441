"""The search: HiGHS where SciPy is there, hull and front where not, never worse than a given plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat._core import to_install
from remat.plan.solve import milp
from remat.plan.solve.host import front
from remat.plan.solve.hull import Cuts, bound, hull
from remat.plan.solve.problem import INF, Problem, Solution, complete, gap_of, keep_all
from remat.plan.solve.reduce import contract
from remat.plan.solve.split import split
from remat.transforms import RematError

# Nodes that HiGHS looks at in a second, roughly.
_NODES = 1000
# What share of a step's time is not worth a search, and at most what share of a plan's price.
_SHARE, _MOST, _GAP = 2e-4, 0.01, 1e-3
# How many ops are tried that need not run again.
_TRIES = 64


@dataclass(frozen=True)
class Solved:
    """A solution with its certificate.

    Attributes:
        solution: the best one found.
        lower_bound: no plan within the budget costs less (unit of the cost model).
        solver: where the solution came from: "exact", "hull", "front", "no recomputation", or the name
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
        return gap_of(self.solution.cost, self.lower_bound)


def solve(
    problem: Problem,
    budget: float,
    *,
    time_limit: float = 0.5,
    gap: float | None = None,
    exact: bool = True,
    candidates: Sequence[tuple[str, Iterable[int]]] = (),
) -> Solved:
    """The cheapest solution within `budget` bytes, with a proven bound.

    Args:
        problem: what may be kept and run again.
        budget: bytes that may be kept.
        time_limit: seconds for the exact search, roughly; when it runs out, the gap says what is proven. It
            is counted in nodes, so that a plan does not depend on how busy the machine is.
        gap: relative gap at which the exact solver may stop; None for 1e-3, or what is 2e-4 of a step.
        exact: let HiGHS look for the optimum, where SciPy is installed. Without, choices are listed, which
            gives the optimum of models whose ops read few others; of other ones the hull's plan is taken.
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
        corners = hull(smaller.problem, around=budget)
        check_feasible(corners, budget)
        floor = bound(corners, budget)
        own = [("hull", max((c for c in corners if c.bytes <= budget), key=lambda c: c.bytes))]
        ceiling = min(s.cost for _, s in (*own, *found, *rivals))
        if ceiling > floor and exact and milp.available():
            best = _optimum(smaller.problem, budget, time_limit, ceiling, gap)
            floor = max(floor, best.lower_bound)
            own += [("exact", best.solution)] if best.solution is not None else []
        elif ceiling > floor and (best := _listed(smaller.problem, budget)) is not None:
            floor = best.cost
            own.append(("front", best))
        name, small = min(own, key=lambda pair: pair[1].cost)
        found.append((name, smaller.whole(problem, _tidied(smaller.problem, small, budget))))
    name, best = min([*found, *rivals], key=lambda pair: (pair[1].cost, pair[1].bytes))
    return Solved(best, min(floor, best.cost), name, time.perf_counter() - start)


def tell_greedy(name: str, gap: float) -> None:
    """Say of a plan that was made without SciPy how far it may be off."""
    if gap > _GAP and not milp.available():
        text = "Without SciPy the plan of %s is a rough one: at most %.1f %% of what it recomputes could be "
        text += f"spared. For the best one found, {to_install('plan')}."
        logging.getLogger("remat").warning(text, name, 100 * gap)


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


def _optimum(
    problem: Problem,
    budget: float,
    time_limit: float,
    ceiling: float,
    gap: float | None,
) -> milp.Exact:
    """The optimum, where that is below `ceiling`, the price of a plan in hand."""
    nodes, step = int(_NODES * time_limit) + 1, margin_of(problem, 1.0)
    near = max(_GAP, min(_SHARE * step / ceiling, _MOST)) if gap is None else gap
    found = milp.solve_exactly(problem, budget, nodes=nodes, gap=near, ceiling=ceiling)
    better = found.solution is not None and found.solution.cost < ceiling
    return milp.Exact(found.solution if better else None, min(found.lower_bound, ceiling))


def _listed(problem: Problem, budget: float) -> Solution | None:
    """The optimum, from a list of all choices that no other beats; None where the problem is too tangled."""
    fitting = [placed for placed in front(problem, 0) if placed.device <= budget]
    return complete(problem, fitting[-1].kept) if fitting else None


def _tidied(problem: Problem, solution: Solution, budget: float) -> Solution:
    """A solution as good, where of equal parts the later ones keep more, for they keep it for less long; and
    what there is room for is not run again, though its price is lost in the gap."""
    saved = set[int]()
    for part in split(problem):
        kept = [tuple(k for k, v in enumerate(place) if v in solution.saved) for place in part.places]
        kept.sort(key=lambda values: (sum(part.problem.size[k] for k in values), values))
        for place, values in zip(sorted(part.places), kept, strict=True):
            saved.update(place[k] for k in values)
    best = complete(problem, saved) or solution
    more = [v for o in best.replayed for v in problem.outputs[o] if problem.size[v] <= budget - best.bytes]
    more.sort(key=lambda v: (-problem.cost[problem.producer[v]] / max(problem.size[v], 1), v))
    for value in more[:_TRIES]:
        other = complete(problem, best.saved | {value})
        if other is not None and other.bytes <= budget and other.cost < best.cost:
            best = other
    return best


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
    ends = Cuts(problem).extremes()
    check_feasible([] if ends is None else [ends[0]], float("inf"))
    assert ends is not None
    return ends[0]
