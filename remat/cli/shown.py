"""A report on the terminal, and as a page."""

from __future__ import annotations

from pathlib import Path

from remat._inspect.report import Explanation


def show(report: Explanation, json: bool, html: Path | None = None) -> int:
    """Print the report, as text or JSON, and write the page; returns the exit code."""
    from rich.console import Console

    if json:
        print(report.to_json(indent=2))
    else:
        # A figure is never cut: in a narrow terminal, or a pipe of 80 columns, lines are longer.
        least = Console(width=10_000).measure(report).maximum
        Console(highlight=False, width=max(Console().width, least)).print(report)
    if html:
        report.save(html)
    return 0
