"""Each program of a bug report is held by a test or a program of the bank (docs/measured/trust.md)."""

from __future__ import annotations

import re
from pathlib import Path

from tests.bank import BANK

ROOT = Path(__file__).parents[2]
TABLE = (
    (ROOT / "docs" / "measured" / "trust.md")
    .read_text()
    .partition("## Programs of bug reports")[2]
    .partition("\n## ")[0]
)
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| ")][1:]


def test_no_program_is_named_twice() -> None:
    names = [name for name, *_ in ROWS]
    assert len(names) == len(set(names)) > 80


def test_what_holds_a_program_is_there() -> None:
    for name, _, _, held in ROWS:
        found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", held)
        for path, test in found:
            assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE), (name, path, test)
        programs = re.findall(r"`(\w+)` of the bank", held)
        assert set(programs) <= set(BANK), (name, programs)
        assert found or programs or held == "not mended, no test", name
