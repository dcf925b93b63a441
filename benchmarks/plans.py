"""The front check: whether a planned point is beaten by a policy that anyone can write.

    python -m benchmarks run --suite plans     # measures, and checks at its end
    python -m benchmarks.plans                 # checks results/plans.csv

A point is beaten by one of no more memory that takes 2 % less time, by the median of the steps' ratio in each
round. Memory is what the plan bounds: kept bytes of a budget, the peak of a fit. Points that are beaten at
their peak are printed, too. Peers of torch and JAX do not count here: the fronts of
`benchmarks.suite.tables` are about them.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

from benchmarks.common.peers import is_planned
from benchmarks.common.records import RESULTS
from benchmarks.suite.loaded import MIB, Panel, Results
from benchmarks.suite.pareto import Point

MARGIN = 0.02


def beaten(panel: Panel, *, at_peak: bool = False) -> list[tuple[Point, Point]]:
    """The planned points that another one beats, each with the one that does so by most."""
    rivals = [point for point in panel.points("remat", "none") if not is_planned(point.name)]
    found = []
    for point in planned(panel):
        metric = "peak" if at_peak or point.name.startswith("fit ") else "kept"
        most = memory(panel, point, metric)
        shares = {
            rival: share_of(panel, rival, point) for rival in rivals if memory(panel, rival, metric) <= most
        }
        fastest = min(shares, key=lambda rival: shares[rival], default=None)
        if fastest is not None and shares[fastest] < 1 - MARGIN:
            found.append((point, fastest))
    return found


def planned(panel: Panel) -> list[Point]:
    return [point for point in panel.points("remat") if is_planned(point.name)]


def memory(panel: Panel, point: Point, metric: str) -> float:
    """Kept bytes, or the peak where there are none."""
    row = panel.value(point.name, metric)
    return point.memory if row is None or row.value is None else row.value


def share_of(panel: Panel, rival: Point, point: Point) -> float:
    """A rival's time as a share of a planned point's: of the same rounds, where these are known."""
    row = panel.value(point.name, f"step over {rival.name}")
    return rival.time / point.time if row is None or not row.value else 1 / row.value


def check(path: Path) -> int:
    """Says which planned points are beaten; 1 where any is, or where there is none to look at."""
    results = Results.load(path)
    panels = results.panels() if results is not None else []
    total, lost = sum(len(planned(panel)) for panel in panels), []
    for at_peak in (True, False):
        pairs = [(panel, *pair) for panel in panels for pair in beaten(panel, at_peak=at_peak)]
        lost.append(len(pairs))
        what = "beaten at its peak" if at_peak else "beaten"
        for panel, point, rival in pairs:
            share = 1 - share_of(panel, rival, point)
            print(f"{panel.title}: {told(panel, point)} is {what} by {told(panel, rival)}, {share:.1%}")
    print(f"at their peaks {lost[0]} of {total} planned points are beaten by more than {MARGIN:.0%}")
    print(f"front: {lost[1]} of {total} planned points are beaten by more than {MARGIN:.0%}")
    for metric in ("step", "step over none", "kept", "peak"):
        if errors := [error for panel in panels for error in missed(panel, metric)]:
            middle, most = statistics.median(errors), max(errors)
            print(f"predicted {metric}: median error {middle:.1%}, most {most:.1%}, of {len(errors)}")
    for model in dict.fromkeys(panel.rows[0].model for panel in panels):
        own = [error for panel in panels if panel.rows[0].model == model for error in missed(panel, "step")]
        if own:
            print(f"predicted step of {model}: median error {statistics.median(own):.1%}, of {len(own)}")
    return int(lost[1] > 0 or total == 0)


def missed(panel: Panel, metric: str) -> list[float]:
    """How far predictions are from what was measured, as shares of that; "over none": both over no remat."""
    plain, metric = metric.endswith("over none"), metric.removesuffix(" over none")
    errors = []
    for point in planned(panel):
        rows = [panel.value(peer, f"predicted {metric}") for peer in (point.name, "none")]
        rows += [panel.value(peer, metric) for peer in (point.name, "none")]
        told, base, found, under = [row.value if row is not None and row.value else 0.0 for row in rows]
        if plain:
            told, found = told / (base or math.inf), found / (under or math.inf)
        if told and found:
            errors.append(abs(told / found - 1))
    return errors


def told(panel: Panel, point: Point) -> str:
    kept, peak = memory(panel, point, "kept") / MIB, point.memory / MIB
    return f"{point.name} (keeps {kept:.1f}, peak {peak:.1f} MiB, {point.time:.1f} ms)"


if __name__ == "__main__":
    raise SystemExit(check(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "plans.csv"))
