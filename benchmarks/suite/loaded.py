"""A suite's CSV, read back: panels of peers, fits, seconds and overheads."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suite.cases import Measured, read
from benchmarks.suite.pareto import Point

MIB = 1 << 20


@dataclass(frozen=True)
class Results:
    """All rows of a suite, and the machine and versions of the first."""

    suite: str
    context: dict[str, str]
    rows: list[Measured]
    torch: list[str]
    commits: list[str]

    @classmethod
    def load(cls, path: Path) -> Results | None:
        """None where nothing was measured."""
        if not path.exists():
            return None
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        full = [line for line in lines if line["python"]] or lines
        return (
            cls(
                path.stem,
                full[0],
                [read(line) for line in lines],
                [line["torch"] for line in lines],
                [line["commit"] for line in lines],
            )
            if lines
            else None
        )

    def sentence(self, panel: Panel | None = None) -> str:
        """The hardware sentence that stands above every table: of all rows, or of a panel's."""
        pairs = zip(self.rows, self.commits, strict=True)
        found = [commit for row, commit in pairs if panel is None or row in panel.rows]
        commits = ", ".join(dict.fromkeys(found))
        versions = ", ".join(dict.fromkeys(self.torch))
        hidden = any(row.unit == "ms of CPU time" for row in self.rows)
        clock = " Times are the process's CPU time: others used the machine, too." if hidden else ""
        return (
            f"{self.context['hardware']}, {self.context['cpu_count']} cores, {self.context['threads']} CPU "
            f"thread(s) used, torch {versions}, Python {self.context['python']}, commit {commits}.{clock}"
        )

    def of_kind(self, kind: str) -> list[Measured]:
        return [row for row in self.rows if row.kind == kind]

    def panels(self) -> list[Panel]:
        """Panels in which time was taken."""
        return [panel for panel in self.all_panels() if panel.points()]

    def all_panels(self) -> list[Panel]:
        grouped: dict[tuple[str, str], list[Measured]] = defaultdict(list)
        for row, torch in zip(self.rows, self.torch, strict=True):
            if row.kind == "panel":
                grouped[row.case, torch].append(row)
        several = len(set(self.torch)) > 1
        return [Panel(rows, torch if several else "") for (_, torch), rows in grouped.items()]


@dataclass(frozen=True)
class Panel:
    """One case's rows, under one torch."""

    rows: Sequence[Measured]
    torch: str = ""

    @property
    def title(self) -> str:
        first = self.rows[0]
        size = f"{first.depth} blocks" if first.model != "unet" else f"{first.depth} levels"
        parts = (
            first.model,
            size,
            f"{first.batch} x {first.seq}",
            first.dtype,
            MODES[first.mode],
            first.engine,
        )
        return ", ".join([*parts, *([f"torch {self.torch}"] if self.torch else [])])

    @property
    def peers(self) -> list[str]:
        return list(dict.fromkeys(row.peer for row in self.rows if row.peer))

    def value(self, peer: str, metric: str) -> Measured | None:
        return next((row for row in self.rows if (row.peer, row.metric) == (peer, metric)), None)

    def error(self, peer: str) -> str:
        row = self.value(peer, "error")
        return row.error if row else ""

    def family(self, peer: str) -> str:
        return next(row.family for row in self.rows if row.peer == peer)

    def points(self, *families: str) -> list[Point]:
        """Peak and median step of the peers that ran, those of `families` only if any are given."""
        found = []
        for peer in self.peers:
            peak, step = self.value(peer, "peak"), self.value(peer, "step")
            if peak and step and (not families or self.family(peer) in families):
                found.append(Point(peer, peak.value or 0.0, step.value or 0.0))
        return found


MODES = {
    "backward": ".backward()",
    "blocks": ".backward(), block by block",
    "func": "torch.func.grad",
    "vmap": "vmap(grad)",
    "step": "one-graph step",
    "scan": "scan_layers",
}
