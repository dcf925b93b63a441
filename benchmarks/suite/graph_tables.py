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
    each = [f"{title(mode)}\n\n{panel(found)}" for mode, found in panels.items()]
    return {
        "docs/measured/gpu.md": {"graphs": "\n".join([f"{how(rows)}\n", *each, *failed(panels)])},
        "docs/measured/benchmarks.md": {"pairs": pairs(panels)},
    }


def panels_of(rows: list[Row]) -> dict[str, list[Row]]:
    """One model in one mode each."""
    modes = dict.fromkeys(row["mode"] for row in rows)
    return {mode: [row for row in rows if row["mode"] == mode] for mode in modes}


def title(mode: str) -> str:
    """What was compiled."""
    sizes, _, way = mode.rpartition(", ")
    return f"{sizes}, bfloat16, {MODES[way]}."


def how(rows: list[Row]) -> str:
    """What all figures are, and with what they were made."""
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return (
        f"**Compiled for, not run on**: simulated by `remat.gpu` with torch {rows[0]['torch']}, commit "
        f"{commits}. Peak is above parameters and batch."
    )


def panel(rows: list[Row]) -> str:
    """A table of all peers that were compiled."""
    lines = [
        (tables.code(peer), *(f"{value(rows, peer, metric):{form}}" for metric, _, form in FIGURES))
        for peer in dict.fromkeys(row["policy"] for row in rows if row["value"])
    ]
    return tables.table(("peer", *(title for _, title, _ in FIGURES)), lines)


def failed(panels: dict[str, list[Row]]) -> Iterator[str]:
    """Which peers could not be compiled, and why: a line for each reason."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for mode, rows in panels.items():
        for row in rows:
            if row["error"]:
                peers, ways = found.setdefault(row["error"], ({}, {}))
                peers[tables.code(row["policy"])] = ways[MODES[mode.rpartition(", ")[2]]] = None
    for error, (peers, ways) in found.items():
        yield f"{', '.join(peers)} ({', '.join(ways)}):\n\n    {error}\n"


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
