"""Rows of steps that are compiled for a GPU: a table, a chart, JSON."""

from __future__ import annotations

import json as writer
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from remat._core import Page, Series, Spot, Table, as_text, chart, format_bytes
from remat.gpu import MARK, GpuReport
from remat.transforms import RematError

# A name, and what compiles the step.
Row = tuple[str, Callable[[], GpuReport]]
COLUMNS = (
    "policy",
    ">kept",
    ">peak",
    ">fits",
    ">launches",
    ">TFLOP",
    ">roofline ms",
    ">CUDA graph",
    ">spilling",
)


def show(title: str, device: str, rows: Iterable[Row], json: bool, svg: Path | None = None) -> int:
    """Compile each row for the card and print what comes of it; the exit code, 1 where one failed.

    Args:
        title: what is compiled.
        device: of `remat.gpu.CARDS`.
        rows: what to compile.
        json: print one JSON object instead of the table.
        svg: where to draw peaks against roofline times.
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
        print(as_text(_page(heading, found)))
    reports = {name: report for name, report in found.items() if isinstance(report, GpuReport)}
    if svg and reports:
        svg.write_text(drawn(heading, reports))
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
    )
    spills = sum(kernel.spills or 0 for kernel in report.kernels)
    figures = {key: getattr(report, key) for key in names}
    counts = {"launches": len(report.kernels), "spills": spills, "differing": len(report.differing)}
    return {"policy": name} | figures | counts


def _page(heading: str, found: dict[str, GpuReport | str]) -> Page:
    blank = ("error", *[""] * (len(COLUMNS) - 2))
    rows = [(name, *(_cells(r) if isinstance(r, GpuReport) else blank)) for name, r in found.items()]
    reports = [(name, report) for name, report in found.items() if isinstance(report, GpuReport)]
    notes = [f"{name}: {report}" for name, report in found.items() if isinstance(report, str)]
    for name, report in reports:
        if not report.survived:
            notes.append(f"{name}: a region lost its recomputation")
        elif report.differing:
            notes.append(f"{name}: other bits than in the forward are possible, as {report.differing[0]}")
    # Policies mostly have one reason in common.
    for reason in dict.fromkeys(report.not_capturable for _, report in reports if report.not_capturable):
        names = ", ".join(name for name, report in reports if report.not_capturable == reason)
        notes.append(f"{names}: not in a CUDA graph, {reason}")
    return Page((), (Table(heading, COLUMNS, tuple(rows)),), tuple(notes))


def _cells(report: GpuReport) -> tuple[str, ...]:
    spills = [kernel.spills for kernel in report.kernels if kernel.spills is not None]
    return (
        format_bytes(report.kept),
        format_bytes(report.peak),
        "yes" if report.fits else "no",
        str(len(report.kernels)),
        f"{report.flops / 1e12:.3g}",
        f"{1e3 * report.seconds:.4g}",
        "no" if report.not_capturable else "yes",
        str(sum(map(bool, spills))) if spills else "",
    )


def drawn(heading: str, reports: dict[str, GpuReport]) -> str:
    """Simulated peak against roofline time, one point a row, as an SVG."""
    spots = [Spot(1e3 * report.seconds, report.peak / 2**20, name) for name, report in reports.items()]
    return chart(heading, "roofline time, ms", "simulated peak, MiB", [Series(spots)], zero=(False, False))
