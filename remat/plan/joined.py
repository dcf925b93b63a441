"""One budget for regions whose values may also go to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat.plan.graph import Graph
from remat.plan.solve import INF, Joined, Placed, Problem, front, place

# Shares of the windows, tried until one fits: what is on its way takes room on the device.
_SHARES = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class OverLink:
    """Choices for all regions, and the bytes that are on their way at once at most."""

    joined: Joined
    moving: int


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
    fronts: dict[tuple[Problem, float], list[Placed]] = {}
    for share in _SHARES:
        rows = []
        for graph, problem, window in zip(graphs, problems, most, strict=True):
            made, wide = len(graph.ops), share * window
            if (problem, wide) not in fronts:
                fronts[problem, wide] = front(problem, wide, lambda value, made=made: value < made)
            rows.append(fronts[problem, wide])
        # One region's values leave, or come, while the next one's do.
        moving = 2 * int(max((max(p.host for p in row) for row in rows if row), default=0))
        if all(rows) and (joined := place(rows, budget - moving)) is not None:
            return OverLink(replace(joined, device=joined.device + moving), moving)
    return None
