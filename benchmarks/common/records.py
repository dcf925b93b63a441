"""Long CSV records of measurements, targets, and the table that shows both."""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from remat.cli.commands.env import machine

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Record:
    """One measured value; p20, p50 and p80 are its spread where it was taken more than once.

    `error` holds the first line of what was raised instead, and the numbers are then None.
    """

    benchmark: str
    mode: str
    policy: str
    metric: str
    unit: str
    value: float | None = None
    p20: float | None = None
    p50: float | None = None
    p80: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Target:
    """A claim: `value` shall be at most `limit`; None when it could not be measured, which is a miss."""

    claim: str
    value: float | None
    limit: float

    @property
    def met(self) -> bool:
        return self.value is not None and self.value <= self.limit


# What measuring itself writes: a tree that differs in these alone is still the code of its commit.
WRITTEN = ("benchmarks/results", "docs", "README.md")


def commit() -> str:
    """The commit that is measured, with `+` when the code differs from it."""
    excluded = [f":(top,exclude){path}" for path in WRITTEN]
    try:
        found = git("rev-parse", "--short=10", "HEAD")
        return found + "+" if git("diff", "--name-only", "HEAD", "--", ":(top)", *excluded) else found
    except (OSError, subprocess.CalledProcessError):
        # Where a copy without its history is measured, whoever made it can say what it is.
        return os.environ.get("GIT_COMMIT", "unknown")


def git(*arguments: str) -> str:
    here = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def save(name: str, records: Sequence[Record], folder: Path = RESULTS, beside: bool = False) -> Path:
    """Writes `name`.csv: one line a record, each with the machine and the versions it was measured on.

    With `beside`, lines that are already there and that this run did not measure, such as those of another
    version of torch, stay, and all keep their order.
    """
    context = machine("cpu") | {"commit": commit()}
    rows = [context | asdict(record) for record in records]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    if beside and path.exists():
        with path.open(newline="") as file:
            old = {measurement(row): row for row in csv.DictReader(file)}
        # What is measured anew takes the place of what was: the first model is the one that README shows.
        rows = sorted((old | {measurement(row): row for row in rows}).values(), key=by_version)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def by_mode(name: str) -> dict[str, dict[str, float]]:
    """What `name`.csv has: the value of each metric, by mode."""
    found: dict[str, dict[str, float]] = {}
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["mode"], {})[row["metric"]] = float(row["value"])
    return found


def measurement(row: dict[str, Any]) -> tuple[str, ...]:
    """What a line of a CSV measures, and with which torch."""
    return tuple([row[key] for key in ("torch", "mode", "policy", "metric")])


def by_version(row: dict[str, Any]) -> str:
    return row["torch"]


def conclude(
    name: str,
    title: str,
    records: Sequence[Record],
    met: Sequence[Target],
    write: bool,
    beside: bool = False,
) -> int:
    """Shows records and targets, writes `name`.csv if asked to (see `save`); the exit status, 1 for a missed
    target."""
    show(title, records, met)
    if write:
        print(save(name, records, beside=beside))
    return int(not all(target.met for target in met))


def show(title: str, records: Sequence[Record], targets: Sequence[Target]) -> None:
    console = Console(width=110)
    table = Table(title=title, title_justify="left")
    for column in ("mode", "policy", "metric", "value", "p20 - p80"):
        table.add_column(column, justify="right" if column in ("value", "p20 - p80") else "left")
    for record in records:
        table.add_row(record.mode, record.policy, record.metric, amount(record), spread(record))
    console.print(table)
    for target in targets:
        console.print(told(target))


def amount(record: Record) -> str:
    return record.error or f"{record.value:.1f} {record.unit}"


def spread(record: Record) -> str:
    return "" if record.p20 is None else f"{record.p20:.1f} - {record.p80:.1f}"


def told(target: Target) -> str:
    value = "not measured" if target.value is None else f"{target.value:.3f}"
    style = "green" if target.met else "red"
    word = "met   " if target.met else "missed"
    return f"[{style}]{word}[/{style}] {target.claim}: {value}, at most {target.limit}"


def ratio(records: Sequence[Record], mode: str, policy: str, to: str) -> float | None:
    """The value of `policy` over that of `to`, both in `mode`."""
    values = {(record.mode, record.policy): record.value for record in records}
    above, below = values.get((mode, policy)), values.get((mode, to))
    return above / below if above is not None and below else None
