"""Fronts of memory against time: what is dominated by what, and how much of the plane a front dominates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A peer's figures in one panel; less is better in both."""

    name: str
    memory: float
    time: float


def dominates(a: Point, b: Point) -> bool:
    """Whether `a` is at least as good as `b` in both; a point dominates its equal."""
    return a.memory <= b.memory and a.time <= b.time


def front(points: Iterable[Point]) -> list[Point]:
    """Those that no other point beats, by memory; of equal ones the first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.memory, p.time)):
        if not best or point.time < best[-1].time:
            best.append(point)
    return best


def hypervolume(points: Iterable[Point], corner: tuple[float, float]) -> float:
    """The share of the rectangle from the origin to `corner` (memory, time) that `points` dominate.

    Example:
        >>> from benchmarks.suite.pareto import Point, hypervolume
        >>> hypervolume([Point("a", 1.0, 1.0)], (2.0, 2.0))
        0.25
    """
    memory, time = corner
    area, ceiling = 0.0, time
    for point in front(p for p in points if p.memory < memory and p.time < time):
        area += (memory - point.memory) * (ceiling - point.time)
        ceiling = point.time
    return area / (memory * time)


def corner_of(points: Sequence[Point]) -> tuple[float, float]:
    """The worst memory and the worst time, with a tenth more, so that the outermost points count too."""
    return 1.1 * max(p.memory for p in points), 1.1 * max(p.time for p in points)


def factor(point: Point, ours: Sequence[Point]) -> float:
    """The least factor by which `point` may grow in both and still is not dominated by any of `ours` before.

    At most 1: it is dominated. 1.02: some point of ours is within 2 % in memory and in time.
    """
    return min((max(o.memory / point.memory, o.time / point.time) for o in ours), default=math.inf)


def undominated(theirs: Iterable[Point], ours: Sequence[Point]) -> list[tuple[Point, float]]:
    """The points of `theirs` that none of `ours` dominates, each with its `factor`."""
    return [(p, factor(p, ours)) for p in theirs if not any(dominates(o, p) for o in ours)]


def time_ratios(theirs: Iterable[Point], ours: Sequence[Point]) -> list[float]:
    """At each memory on their front: our best time with no more memory over theirs; inf for none."""
    return [
        min((o.time for o in ours if o.memory <= p.memory), default=math.inf) / p.time for p in front(theirs)
    ]
