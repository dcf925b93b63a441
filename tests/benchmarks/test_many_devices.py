"""The committed table of layouts and policies: every row is there, and says what the page promises."""

import itertools
from pathlib import Path

from benchmarks.many_devices.layouts import LAYOUTS, POLICIES, title

PAGE = Path(__file__).parents[2] / "docs" / "measured" / "layouts.md"
# Ours, and torch's with the same verdicts.
SAME = {
    "save_nothing": "torch checkpoint",
    "save_matmuls": "torch SAC (matmuls)",
    "save_matmuls \\| save_collectives": "torch SAC (matmuls and collectives)",
}


def tables() -> dict[str, dict[str, list[str]]]:
    """Of each layout the cells of each policy."""
    found = {}
    for section in PAGE.read_text().split("\n### ")[1:]:
        lines = [line for line in section.splitlines() if line.startswith("| ") and "kept KiB" not in line]
        rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
        found["### " + section.splitlines()[0]] = {cells[0]: cells[1:] for cells in rows}
    return found


def test_no_cell_of_ours_keeps_more_than_torch_s_and_none_has_other_gradients():
    found = tables()
    assert list(found) == list(map(title, LAYOUTS))
    for (layout, rows), policy in itertools.product(found.items(), POLICIES):
        kept, *_ = cells = rows[policy]
        if kept.startswith("raises"):
            assert policy.startswith("torch SAC"), (layout, policy)
            continue
        assert cells[-1] == "0", (layout, policy)
        theirs = rows.get(SAME.get(policy, ""), ["raises"])[0]
        assert theirs.startswith("raises") or float(kept) <= float(theirs), (layout, policy)
