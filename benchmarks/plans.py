"""The front check: whether a planned point is beaten by a policy that anyone can write.

    python -m benchmarks run --suite plans     # measures, and checks at its end
    python -m benchmarks.plans                 # checks results/plans.csv

A point is beaten by one of no more memory that takes 2 % less time. Peers of torch and JAX do not count here:
the fronts of `benchmarks.tables` are about those.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.loaded import MIB, Panel, Results
from benchmarks.pareto import Point
from benchmarks.records import RESULTS

MARGIN = 0.02
PLANNED = ("budget ", "fit ")


def beaten(panel: Panel) -> list[tuple[Point, Point]]:
    """The planned points that another one beats, each with the fastest that does."""
    points = panel.points("remat", "none")
    rivals = [point for point in points if not point.name.startswith(PLANNED)]
    found = []
    for point in planned(panel):
        better = [r for r in rivals if r.memory <= point.memory and r.time < (1 - MARGIN) * point.time]
        if better:
            found.append((point, min(better, key=lambda rival: rival.time)))
    return found


def planned(panel: Panel) -> list[Point]:
    return [point for point in panel.points("remat") if point.name.startswith(PLANNED)]


def check(path: Path) -> int:
    """Says which planned points are beaten; 1 where any is, or where there is none to look at."""
    results = Results.load(path)
    panels = results.panels() if results is not None else []
    total = lost = 0
    for panel in panels:
        total += len(planned(panel))
        for point, rival in beaten(panel):
            lost += 1
            print(f"{panel.title}: {told(point)} is beaten by {told(rival)}")
    print(f"front: {lost} of {total} planned points are beaten by more than {MARGIN:.0%}")
    return int(lost > 0 or total == 0)


def told(point: Point) -> str:
    return f"{point.name} ({point.memory / MIB:.1f} MiB, {point.time:.1f} ms)"


if __name__ == "__main__":
    raise SystemExit(check(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "plans.csv"))
