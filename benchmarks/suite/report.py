"""`python -m benchmarks report`: figures and the tables of README and docs, from the CSVs alone."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.common.records import RESULTS
from benchmarks.overhead import ALTERNATING, MODE, OVER
from benchmarks.suite import card, graph_tables, tables
from benchmarks.suite.loaded import Results
from benchmarks.suite.plots import SHOWN, draw, picture

ROOT = Path(__file__).parents[2]
Suite = Literal["quick", "cpu", "card", "versions"]
SUITES: dict[Suite, str] = {
    "quick": "Quick",
    "cpu": "All models and modes on a CPU",
    "card": "One GPU",
    "versions": "Versions of torch",
}
# The page of each suite: a reader of one should not load the pictures of all.
PAGES: dict[Suite, str] = {
    "quick": "measured/benchmarks.md",
    "cpu": "measured/benchmarks-cpu.md",
    "card": "measured/benchmarks-gpu.md",
    "versions": "measured/benchmarks-cpu.md",
}
# Suites with figures. The others' tables are many, and a page should load fast.
DRAWN: tuple[Suite, ...] = ("quick", "card")


@dataclass
class Report:
    """Write figures and tables from the CSVs of the suites."""

    results: Path = RESULTS
    """Folder with the CSVs."""
    root: Path = ROOT
    """The checkout whose README.md and docs/ are written."""
    suites: tuple[Suite, ...] = tuple(SUITES)
    """Suites whose figures and tables are made anew."""

    def __call__(self) -> int:
        found: dict[Suite, Results | None] = {
            suite: Results.load(self.results / f"{suite}.csv") for suite in self.suites
        }
        for results in filter(None, map(found.get, DRAWN)):
            for path in draw(results, self.root / "docs" / "figures"):
                print(path)
        texts: dict[Suite, str] = {s: section(s, results, self.root) for s, results in found.items()}
        for page in sorted({PAGES[suite] for suite in texts}):
            mine = {suite: texts[suite] for suite in found if PAGES[suite] == page}
            rewrite(self.root / "docs" / page, mine)
        rewrite(
            self.root / "docs" / "measured/benchmarks.md",
            {"instructions": instructions(counted(self.results))},
        )
        if paired := Results.load(self.results / "pairs.csv"):
            text = f"{paired.sentence()}\n\n{tables.pairs_table(paired)}"
            rewrite(self.root / "docs" / "measured/benchmarks.md", {"compiled": text})
        if (self.results / "graphs.csv").exists():
            graphs = graph_tables.load(self.results)
            for page, written in graph_tables.pages(graphs).items():
                rewrite(self.root / page, written)
            simulated = card.simulated(graphs, Results.load(self.results / "card.csv"))
            rewrite(self.root / "docs" / "measured" / "gpu.md", {"card": simulated})
        if measured := Results.load(self.results / "card.csv"):
            rewrite(self.root / "README.md", {"card": headline(measured)})
        return 0


def rewrite(path: Path, texts: Mapping[Any, str]) -> None:
    """Puts every text between the markers of its name in the file."""
    content = path.read_text()
    for name, text in texts.items():
        content = filled(content, name, text)
    path.write_text(content)
    print(path)


def filled(content: str, name: str, text: str) -> str:
    """`content` with `text` between the two markers of `name`.

    Raises:
        ValueError: it has no such markers; a table that lands nowhere would go stale unnoticed.
    """
    between = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- {name} ends -->)", re.DOTALL)
    content, count = between.subn(lambda match: f"{match[1]}\n{text}\n{match[2]}", content)
    if not count:
        raise ValueError(f"no lines `<!-- {name}: ... -->` and `<!-- {name} ends -->`")
    return content


def headline(results: Results) -> str:
    """README's table: ten rows of the first compiled panel."""
    panel = next((p for p in results.panels() if p.rows[0].engine == "compiled"), None) or results.panels()[0]
    return f"{panel.title}. {results.sentence(panel)}\n\n{tables.panel_table(panel, SHOWN).rstrip()}\n"


def bookkeeping(cpu: dict[Any, float]) -> list[str]:
    """What a region adds to the CPU's time, beside torch's; nothing where it was not measured."""
    if not cpu:
        return []
    mixed = cpu["save_nothing", ALTERNATING] / cpu["torch_checkpoint", ALTERNATING]
    return [
        "Bookkeeping of a region in eager, in CPU time over no remat (`python -m benchmarks.overhead`): "
        f"`save_nothing` takes {cpu['save_nothing'] / cpu['torch_checkpoint']:.2f} of torch checkpoint's in "
        f"turns of equal steps, {mixed:.2f} in alternating ones; "
        f"`save_matmuls` {cpu['save_matmuls'] / cpu['torch_sac']:.2f} of torch SAC's."
    ]


def overheads(folder: Path) -> dict[Any, float]:
    """CPU time of a block over no remat by row, and by (row, "alternating"), from overhead.csv; empty where
    there is none."""
    path = folder / "overhead.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] == MODE]
    found: dict[Any, float] = {r["policy"]: float(r["value"]) for r in rows if r["metric"] == OVER}
    turns = [row for row in rows if row["metric"] == f"{OVER}, {ALTERNATING}"]
    return found | {(row["policy"], ALTERNATING): float(row["value"]) for row in turns}


def counted(folder: Path) -> dict[tuple[str, str], float]:
    """Thousands of instructions by kind of blocks and row, from instructions.csv; empty without one."""
    path = folder / "instructions.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {(row["mode"], row["policy"]): float(row["value"]) for row in csv.DictReader(file)}


def instructions(counts: dict[tuple[str, str], float]) -> str:
    kinds, names = dict.fromkeys(kind for kind, _ in counts), dict.fromkeys(name for _, name in counts)
    rows = [
        (
            tables.code(name),
            *[f"{counts[kind, name]:,.0f}" if (kind, name) in counts else "" for kind in kinds],
        )
        for name in names
        if name != "none"
    ]
    return tables.table(("row", *["modules" if kind == "backward" else kind for kind in kinds]), rows)


def section(suite: Suite, results: Results | None, root: Path) -> str:
    """A suite's part of its page."""
    heading = f"## {SUITES[suite]}\n"
    if results is None:
        return f"{heading}\nNot measured: there is no `benchmarks/results/{suite}.csv`.\n"
    parts = [heading, results.sentence()]
    if suite == "quick":
        parts += bookkeeping(overheads(RESULTS))
    there = root / "docs" / "figures"
    if (there / f"{suite}_depth.svg").exists():
        parts.append(f"![Memory against depth](../figures/{suite}_depth.svg)")
    for panel in results.panels():
        file = picture(results, panel)
        image = f"![Peak memory against step time](../figures/{file})\n\n" if (there / file).exists() else ""
        parts.append(f"### {panel.title}\n\n{image}{tables.panel_table(panel)}")
    parts += [titled(title, text) for title, text in summaries(results) if "\n| " in text.partition("---")[2]]
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def summaries(results: Results) -> list[tuple[str, str]]:
    return [
        ("Fronts", tables.fronts_table(results)),
        ("Largest batch and longest sequence", tables.fits_table(results)),
        ("CPU overhead in eager", tables.overhead_table(results)),
        ("Seconds before the first step", tables.seconds_table(results)),
        ("Targets, which are meant for an H200", tables.targets_table(results)),
        ("Not run, or not to the end", tables.unmeasured_table(results)),
    ]


def titled(title: str, text: str) -> str:
    return f"### {title}\n\n{text}"
