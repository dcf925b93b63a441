"""Tables of what was compiled for a card (`benchmarks.graphs`)."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from benchmarks.suite import tables
from benchmarks.suite.loaded import MODES
from benchmarks.suite.suites import PAIRS, UNLIKE

Row = dict[str, str]
FIGURES = (("kept", "kept MiB", ".0f"), ("peak", "peak MiB", ".0f"), ("FLOPs", "TFLOP", ".2f"))
FIGURES += (("roofline", "roofline ms", ".1f"), ("launches", "launches", ".0f"))
# Of torch's row with the same verdicts.
LIMITS = {"peak": 1.0, "roofline": 1.02}


def load(folder: Path) -> list[Row]:
    """The lines of graphs.csv."""
    with (folder / "graphs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def pages(rows: list[Row]) -> dict[str, dict[str, str]]:
    """What is written between markers: by page and marker."""
    panels = panels_of(rows)
    found = {mode: panel(mode, mine) for mode, mine in panels.items()}
    return {
        "docs/gpu.md": {"graphs": "\n".join(found.values())},
        "docs/benchmarks.md": {"pairs": pairs(panels)},
        "README.md": {"graphs": next(iter(found.values()))},
    }


def panels_of(rows: list[Row]) -> dict[str, list[Row]]:
    """One model in one mode each."""
    modes = dict.fromkeys(row["mode"] for row in rows)
    return {mode: [row for row in rows if row["mode"] == mode] for mode in modes}


def panel(mode: str, rows: list[Row]) -> str:
    """A table of all peers; what fails is told below it."""
    sizes, _, way = mode.rpartition(", ")
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    heading = (
        f"{sizes}, bfloat16, {MODES[way]}. **Compiled for, not run on**: simulated by `remat.gpu` with "
        f"torch {rows[0]['torch']}, commit {commits}. Peak is above parameters and batch.\n"
    )
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row["error"]:
            failed.setdefault(row["error"], []).append(tables.code(row["policy"]))
    lines = [
        (tables.code(peer), *(f"{value(rows, peer, metric):{form}}" for metric, _, form in FIGURES))
        for peer in dict.fromkeys(row["policy"] for row in rows if row["value"])
    ]
    table = tables.table(("peer", *(title for _, title, _ in FIGURES)), lines)
    notes = "".join(f"\n{', '.join(peers)}: {error}\n" for error, peers in failed.items())
    return f"{heading}\n{table}{notes}"


def value(rows: list[Row], peer: str, metric: str) -> float:
    """Of one peer in a panel; `nan` where it has none."""
    found = [row["value"] for row in rows if (row["policy"], row["metric"]) == (peer, metric)]
    return float(found[0]) if found and found[0] else float("nan")


def pairs(panels: dict[str, list[Row]]) -> str:
    """Peak and roofline time of ours over those of torch's row with the same verdicts, for each panel."""
    heads = ("model", "ours", "torch's", "peak", "roofline", "verdict")
    return tables.table(heads, (line for mode, rows in panels.items() for line in compared(mode, rows)))


def compared(mode: str, rows: list[Row]) -> Iterator[tuple[str, ...]]:
    for policy, rival in PAIRS.items():
        if (mode.partition(",")[0], policy) in UNLIKE:
            continue
        shares = [value(rows, policy, metric) / value(rows, rival, metric) for metric in LIMITS]
        if shares[0] == shares[0]:  # both were compiled
            met = all(share <= most for share, most in zip(shares, LIMITS.values(), strict=True))
            figures = [f"{share:.3f}" for share in shares]
            yield mode, tables.code(policy), tables.code(rival), *figures, "met" if met else "missed"
