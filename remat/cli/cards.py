"""Rows of steps that are compiled for a GPU: a table, a chart, JSON."""

from __future__ import annotations

import json as writer
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from remat._core import format_bytes
from remat.gpu import MARK, GpuReport
from remat.transforms import RematError

# A name, and what compiles the step.
Row = tuple[str, Callable[[], GpuReport]]
COLUMNS = (
    "policy",
    "kept",
    "peak",
    "fits",
    "launches",
    "TFLOP",
    "roofline ms",
    "CUDA graph",
    "C++",
    "spilling",
)


def show(title: str, device: str, rows: Iterable[Row], json: bool, png: Path | None = None) -> int:
    """Compile each row for the card and print what comes of it; the exit code, 1 where one failed.

    Args:
        title: what is compiled.
        device: of `remat.gpu.CARDS`.
        rows: what to compile.
        json: print one JSON object instead of the table.
        png: where to draw peaks against roofline times.
    """
    found: dict[str, GpuReport | str] = {}
    for name, compiled in rows:
        try:
            found[name] = compiled()
        except RematError as error:
            found[name] = " ".join(str(error).split())
    said = {text for text in found.values() if isinstance(text, str)}
    if len(found) > 1 and len(said) == 1 and not any(isinstance(row, GpuReport) for row in found.values()):
        raise RematError(said.pop())
    heading = f"{title}, for {device}: {MARK}"
    if json:
        print(writer.dumps({"device": device, "mark": MARK, "rows": [plain(*row) for row in found.items()]}))
    else:
        _print(heading, found)
    reports = {name: report for name, report in found.items() if isinstance(report, GpuReport)}
    if png and reports:
        draw(png, heading, reports)
    lost = [name for name, report in reports.items() if not report.survived]
    return int(len(reports) < len(found) or bool(lost))


def plain(name: str, report: GpuReport | str) -> dict[str, Any]:
    """A row as plain data; bytes and seconds in full."""
    if isinstance(report, str):
        return {"policy": name, "error": report}
    names = (
        "kept",
        "peak",
        "held",
        "memory",
        "fits",
        "flops",
        "seconds",
        "survived",
        "not_capturable",
        "not_in_cpp",
    )
    spills = sum(kernel.spills or 0 for kernel in report.kernels)
    figures = {key: getattr(report, key) for key in names}
    counts = {"launches": len(report.kernels), "spills": spills, "differing": len(report.differing)}
    return {"policy": name} | figures | counts


def _print(heading: str, found: dict[str, GpuReport | str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=heading, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for name in COLUMNS:
        grid.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for name, report in found.items():
        grid.add_row(name, *(_cells(report) if isinstance(report, GpuReport) else ["error"]))
    console = Console(width=max(Console().width, Console(width=10_000).measure(grid).maximum))
    console.print(grid)
    for name, report in found.items():
        if isinstance(report, str):
            console.print(f"{name}: {report}", markup=False, soft_wrap=True)
        elif not report.survived:
            console.print(f"{name}: a region lost its recomputation", markup=False, soft_wrap=True)
        elif report.differing:
            said = f"{name}: other bits than in the forward are possible, as {report.differing[0]}"
            console.print(said, markup=False, soft_wrap=True)
    reports = [(name, report) for name, report in found.items() if isinstance(report, GpuReport)]
    for what, key in (("not in a CUDA graph", "not_capturable"), ("no C++ wrapper", "not_in_cpp")):
        # Policies mostly have one reason in common.
        for reason in dict.fromkeys(why for _, report in reports if (why := getattr(report, key))):
            names = ", ".join(name for name, report in reports if getattr(report, key) == reason)
            console.print(f"{names}: {what}, {reason}", markup=False, soft_wrap=True)


def _cells(report: GpuReport) -> list[str]:
    spills = [kernel.spills for kernel in report.kernels if kernel.spills is not None]
    return [
        format_bytes(report.kept),
        format_bytes(report.peak),
        "yes" if report.fits else "no",
        str(len(report.kernels)),
        f"{report.flops / 1e12:.3g}",
        f"{1e3 * report.seconds:.4g}",
        "no" if report.not_capturable else "yes",
        "no" if report.not_in_cpp else "yes",
        str(sum(map(bool, spills))) if spills else "",
    ]


def draw(path: Path, heading: str, reports: dict[str, GpuReport]) -> None:
    """Simulated peak against roofline time, one point a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=heading, ylabel="simulated peak, MiB", xlabel="roofline time, ms")
    for index, (name, report) in enumerate(reports.items()):
        axes.plot(1e3 * report.seconds, report.peak / 2**20, "o", color=f"C{index}", label=name)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)
