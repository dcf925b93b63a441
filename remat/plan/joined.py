"""One budget for regions whose values may also go to the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat.plan.chain import Chain, Choice, Stage, packed
from remat.plan.graph import Graph
from remat.plan.solve import INF, Joined, Placed, Problem, cheapest, few, front

# Shares of the windows that there is room for, tried until the bound rises: what is on its way takes room.
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.25)
# More choices than these are thinned out.
_MANY = 2000


@dataclass(frozen=True)
class OverLink:
    """Choices for all regions.

    Attributes:
        joined: the choices.
        moving: bytes that are on their way at once at most.
        alone: no choices without a host cost less than this.
    """

    joined: Joined
    moving: int
    alone: float


def windows(problems: Sequence[Problem], speed: float) -> list[float]:
    """Bytes that a link copies out of each region behind the forward of the next one.

    What the last region keeps is read at once: nothing of it goes.
    """
    seconds = [sum(c for c in problem.cost if c < INF) for problem in problems]
    return [speed * following for following in (*seconds[1:], 0.0)]


def over_link(
    graphs: Sequence[Graph], problems: Sequence[Problem], budget: int, speed: float
) -> OverLink | None:
    """The cheapest choices within `budget` bytes on the device, those on their way to and fro included.

    None where nothing fits, or a region is too tangled.
    """
    most = windows(problems, speed)
    fronts: dict[tuple[int, float], list[Placed]] = {}

    def row(at: int, window: float) -> list[Placed]:
        # By identity: the same problem stands for all regions that are alike, and is looked up in no time.
        key, made = (id(problems[at]), window), len(graphs[at].ops)
        if key not in fronts:
            fronts[key] = front(problems[at], window, lambda value: value < made)
        return fronts[key]

    alone = [row(at, 0.0) for at in range(len(problems))]
    if not all(alone):
        return None
    least, best = INF, None
    for share in _SHARES:
        rows = [row(at, share * min(window, budget / 2)) for at, window in enumerate(most)]
        if not all(rows):
            continue
        # One region's values leave, or come, while the next one's do.
        moving = 2 * int(max(p.host for points in rows for p in points))
        bound = cheapest(rows, budget - moving)
        if best is not None and bound >= least:
            break
        if bound < INF:
            least, best = bound, (rows, moving)
    if best is None or (joined := place(best[0], budget - best[1])) is None:
        return None
    moving = best[1]
    regions, left = _at_home(joined.regions, problems, budget - moving - joined.device)
    joined = replace(joined, regions=regions, device=budget - int(left))
    return OverLink(joined, moving, cheapest(alone, budget))


def place(fronts: Sequence[Sequence[Placed]], budget: float) -> Joined | None:
    """The cheapest choice of each region within `budget` bytes on the device, None where there is none."""
    start = time.perf_counter()
    if not fronts or sum(points[0].device for points in fronts) > budget:
        return None
    every = sum(map(len, fronts)) <= _MANY
    made = {id(points): points if every else few(points) for points in fronts}
    stages = {key: _stage(points) for key, points in made.items()}
    # A chain that holds all of what its stages keep to its end: one table serves for peaks and for this.
    parts, floor = packed(Chain([stages[id(points)] for points in fronts]), int(budget))
    if parts is None:
        chosen = tuple([points[0] for points in fronts])
    else:
        chosen = tuple([made[id(points)][part.choice] for points, part in zip(fronts, parts, strict=True)])
    cost, device = sum(p.cost for p in chosen), sum(p.device for p in chosen)
    # Few regions leave the LP's bound far away, and all of their choices are in the table.
    floor = max(cheapest(fronts, budget), floor if every else 0.0)
    return Joined(chosen, device, cost, min(cost, floor), time.perf_counter() - start)


def _stage(points: Sequence[Placed]) -> Stage:
    choices = [Choice(frozenset(), p.cost, 0.0, p.device, p.device, p.device) for p in points]
    return Stage(tuple(choices), choices[0], 0.0, 0.0, 0, 0)


def _at_home(
    regions: Sequence[Placed], problems: Sequence[Problem], room: float
) -> tuple[tuple[Placed, ...], float]:
    """The same choices with as much kept on the device as there is room for, and the room that is left.

    The price is the same, and the link has less to do.
    """
    found = []
    for placed, problem in zip(reversed(regions), reversed(problems), strict=True):
        stay = set()
        for value in sorted(placed.sent, key=lambda value: (-problem.size[value], value)):
            if (size := problem.size[value]) <= room:
                stay.add(value)
                room -= size
        if stay:
            more = int(sum(problem.size[value] for value in stay))
            moved = placed.device + more, placed.host - more
            placed = replace(
                placed, device=moved[0], host=moved[1], kept=placed.kept | stay, sent=placed.sent - stay
            )
        found.append(placed)
    return tuple(reversed(found)), room
