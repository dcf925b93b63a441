"""Figures from a suite's CSV: memory against time, memory against depth."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.suite.loaded import MIB, Panel, Results
from benchmarks.suite.pareto import Point, front

# Family -> colour, marker, and how the legend calls it.
STYLE = {
    "none": ("black", "*", "no remat"),
    "torch": ("tab:orange", "s", "torch"),
    "torch_remat": ("tab:green", "^", "torch_remat"),
    "jax": ("tab:purple", "D", "JAX"),
    "remat": ("tab:blue", "o", "remat"),
}


def draw(results: Results, folder: Path) -> list[Path]:
    """Writes the figures that the suite has rows for; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Callable[[Any, Results], bool]] = {
        "pareto": pareto,
        "depth": depth,
    }
    made = []
    for name, fill in drawn.items():
        figure = canvas()
        if fill(figure, results):
            made.append(folder / f"{results.suite}_{name}.png")
            # No date and no version in the file: the same CSV gives the same bytes.
            # A tall one, of many panels, in fewer dots: a page has to open at once.
            dpi = min(110, 1800 / figure.get_figheight())
            figure.savefig(made[-1], dpi=dpi, metadata={"Software": None})
            shrink(made[-1])
    return made


def shrink(path: Path) -> None:
    """The picture in 64 colours: lines and labels need no more, and a page of pictures opens at once."""
    from PIL import Image

    # By coverage, or rare colours would be lost.
    image = Image.open(path).convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE)
    image.save(path, optimize=True)


def canvas() -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot's: no window system is asked for and nothing global is left.
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def pareto(figure: Any, results: Results) -> bool:
    """One plot a panel: peak memory against step time, the front of each family as a line."""
    panels = results.panels()
    if not panels:
        return False
    across = min(len(panels), 2 if len(panels) < 8 else 3)
    down = math.ceil(len(panels) / across)
    figure.set_size_inches(6.0 * across, 4.0 * down)
    grid = figure.subplots(down, across, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    labels = [(axes, scatter(axes, panel)) for axes, panel in zip(grid, panels, strict=False)]
    families = [f for f in STYLE if any(panel.points(f) for panel in panels)]
    handles = [
        grid[0].scatter([], [], c=STYLE[f][0], marker=STYLE[f][1], label=STYLE[f][2]) for f in families
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(families))
    # Sizes of texts are known where the figure has been laid out.
    figure.canvas.draw()
    for axes, texts in labels:
        keep_apart(axes, texts)
    return True


def keep_apart(axes: Any, texts: list[Any]) -> None:
    """Moves each label to the first place around its point where it meets no other label and no marker."""
    from matplotlib.transforms import Bbox

    spots = [axes.transData.transform(spot) for line in axes.lines for spot in line.get_xydata()]
    placed = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in spots]
    for text in texts:
        for up, right in itertools.product((4, -9, 13, -18, 22, -27, 31), (True, False)):
            text.set(position=(4 if right else -4, up), horizontalalignment="left" if right else "right")
            box = text.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            if inside and not any(box.overlaps(other) for other in placed):
                break
        placed.append(text.get_window_extent())


def scatter(axes: Any, panel: Panel) -> list[Any]:
    """The points of a panel; the labels, where they are not apart yet."""
    texts = []
    rest = panel.points(*(family for family in STYLE if family != "jax"))
    for family, (colour, marker, _) in STYLE.items():
        points = panel.points(family)
        if family == "jax" and points and off_scale(points, rest):
            # Drawn, they would press all others into a corner.
            axes.text(
                0.98,
                0.97,
                ranges(points),
                color=colour,
                fontsize=7,
                ha="right",
                va="top",
                transform=axes.transAxes,
            )
            continue
        best = front(points)
        times, memories = [p.time for p in best], [p.memory / MIB for p in best]
        axes.plot(times, memories, c=colour, alpha=0.4, drawstyle="steps-pre")
        for point in points:
            spot = point.time, point.memory / MIB
            axes.errorbar(*spot, xerr=spread(panel, point), fmt=marker, c=colour, ms=5, lw=0.7, alpha=0.8)
        for point in best:
            # Labels of a front alone, so that they can be read.
            spot, label = (
                (point.time, point.memory / MIB),
                point.name.removeprefix("torch ").removeprefix("jax "),
            )
            style: dict[str, Any] = {"fontsize": 6, "color": colour, "textcoords": "offset points"}
            texts.append(axes.annotate(label, spot, xytext=(4, 4), **style))
            texts[-1].set_in_layout(False)
    axes.set_title(panel.title, fontsize=8)
    axes.set_xlabel("step, ms (median; p20 to p80)", fontsize=8)
    axes.set_ylabel("peak, MiB", fontsize=8)
    axes.margins(0.12)
    axes.grid(alpha=0.3)
    return texts


def off_scale(points: list[Point], rest: list[Point]) -> bool:
    """Whether all of `points` lie at more than one and a half times the memory of all others."""
    return bool(rest) and min(p.memory for p in points) > 1.5 * max(p.memory for p in rest)


def ranges(points: list[Point]) -> str:
    memories, times = ([f(p) for p in points] for f in (lambda p: p.memory / MIB, lambda p: p.time))
    low, high = f"{min(memories):.0f}-{max(memories):.0f} MiB", f"{min(times):.0f}-{max(times):.0f} ms"
    return f"JAX, off the scale:\n{low}, {high}"


def spread(panel: Panel, point: Point) -> list[list[float]]:
    """Down to p20 and up to p80."""
    step = panel.value(point.name, "step")
    low, high = (step.p20 or 0.0, step.p80 or 0.0) if step else (point.time, point.time)
    return [[max(point.time - low, 0)], [max(high - point.time, 0)]]


def depth(figure: Any, results: Results) -> bool:
    """Kept bytes of every peer against the number of blocks."""
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    family: dict[str, str] = {}
    for panel in results.all_panels():
        if panel.points() or panel.rows[0].mode != "backward":
            continue
        for row in panel.rows:
            if row.metric == "kept" and row.depth and row.value:
                lines[row.peer][row.depth], family[row.peer] = row.value / MIB, row.family
    if not any(len(line) > 1 for line in lines.values()):
        return False
    figure.set_size_inches(6.4, 4.2)
    axes = figure.subplots()
    dashes = ["-", "--", ":", "-."]
    for index, (name, line) in enumerate(lines.items()):
        colour, marker, _ = STYLE[family[name]]
        axes.plot(list(line), list(line.values()), marker + dashes[index % 4], c=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="blocks", ylabel="kept between forward and backward, MiB", title="memory against depth")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return True
