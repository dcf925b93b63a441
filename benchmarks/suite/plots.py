"""Charts from a suite's CSV, one a panel: peak memory against step time; and memory against depth."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from benchmarks.suite.loaded import MIB, Panel, Results
from benchmarks.suite.pareto import Point, front
from remat._core import Series, Spot, chart

# Family -> its colour's number.
COLOURS = {"none": 4, "torch": 1, "torch_remat": 2, "jax": 3, "remat": 0}
# What README shows of a panel: ten rows, one for each way to choose.
SHOWN = (
    "none",
    "torch checkpoint",
    "torch SAC",
    "torch_remat regions",
    "jax save_nothing",
    "jax save_matmuls",
)
SHOWN += ("save_nothing", "save_matmuls", "save_matmuls | save_attention", "budget 0.5")


def draw(results: Results, folder: Path) -> list[Path]:
    """Write a chart of each panel, and one of depths where there are several; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {picture(results, panel): scatter(panel) for panel in results.panels() if panel.points()}
    if lines := depths(results):
        drawn[f"{results.suite}_depth.svg"] = lines
    for name, svg in drawn.items():
        (folder / name).write_text(svg)
    return [folder / name for name in drawn]


def picture(results: Results, panel: Panel) -> str:
    """The file of a panel's chart."""
    return f"{results.suite}_{results.panels().index(panel) + 1}.svg"


def scatter(panel: Panel, peers: tuple[str, ...] = (), title: str = "") -> str:
    """Each peer's peak and time with its spread; those of a front are named, or all of `peers`."""
    series, peak = [], "peak, MiB"
    rest = panel.points(*(family for family in COLOURS if family != "jax"))
    for family, colour in COLOURS.items():
        points = [p for p in panel.points(family) if not peers or p.name in peers]
        if family == "jax" and points and off_scale(points, rest):
            # Drawn, they would press all others into a corner.
            peak += f" (off the scale: {points[0].name}, {points[0].memory / MIB:.0f})"
            continue
        named = points if peers else front(points)
        spots = [spot(panel, point) for point in points]
        bare = [s if point in named else replace(s, label="") for s, point in zip(spots, points, strict=True)]
        series.append(Series(bare, colour))
    return chart(title or panel.title, "step, ms: median, p20 to p80", peak, series, zero=(False, False))


def spot(panel: Panel, point: Point) -> Spot:
    step = panel.value(point.name, "step")
    spread = (
        (min(step.p20, point.time), max(step.p80, point.time)) if step and step.p20 and step.p80 else None
    )
    return Spot(point.time, point.memory / MIB, point.name.replace("none", "no remat"), spread)


def off_scale(points: list[Point], rest: list[Point]) -> bool:
    """Whether all of `points` lie at more than one and a half times the memory of all others."""
    return bool(rest) and min(p.memory for p in points) > 1.5 * max(p.memory for p in rest)


def depths(results: Results) -> str:
    """Kept bytes of every peer against the number of blocks; empty where all have one depth."""
    lines: dict[str, list[Spot]] = defaultdict(list)
    family: dict[str, str] = {}
    for panel in results.all_panels():
        if panel.points() or panel.rows[0].mode != "backward":
            continue
        for row in panel.rows:
            if row.metric == "kept" and row.depth and row.value:
                lines[row.peer].append(Spot(row.depth, row.value / MIB))
                family[row.peer] = row.family
    if not any(len(line) > 1 for line in lines.values()):
        return ""
    series = [
        Series([*line[:-1], replace(line[-1], label=name)], COLOURS[family[name]], line=True)
        for name, line in lines.items()
    ]
    return chart("Memory against depth", "blocks", "kept between forward and backward, MiB", series)
