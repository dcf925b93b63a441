"""A report on the terminal, and as a page."""

from __future__ import annotations

from pathlib import Path

from remat._inspect.report import Comparison, Explanation


def show(report: Explanation | Comparison, json: bool, html: Path | None = None) -> int:
    """Print the report, as text or JSON, and write the page; returns the exit code."""
    from rich.console import Console

    if json:
        print(report.to_json(indent=2))
    else:
        Console(highlight=False).print(report)
    if html:
        report.save(html)
    return 0
