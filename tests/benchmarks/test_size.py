"""`benchmarks.size` counts statements, and neither docstrings nor what is written twice by a link."""

from __future__ import annotations

from pathlib import Path

from benchmarks.size import BY_HAND, ROOT, Size, size_below, size_of, table

_SOURCE = '''"""A module."""

import os


class Name:
    """Two
    lines."""

    value: int = 0


def function(x):
    """One."""
    ...
    # A comment is not a statement.
    if x:
        return os
    "no docstring, and not a statement either"
    return (
        x
    )
'''


def test_statements_are_counted() -> None:
    # import, class, value, def, if, return, return; the module, the class and the function have docstrings.
    assert size_of(_SOURCE) == Size(1, 7, 22, 3, 3, 4)


def test_a_folder_is_the_sum_of_its_files(tmp_path: Path) -> None:
    for name in ("one.py", "room/two.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(_SOURCE)
    (tmp_path / "text.md").write_text("import nothing")
    (tmp_path / "linked").symlink_to(tmp_path / "room")
    assert size_below(tmp_path) == size_of(_SOURCE) + size_of(_SOURCE)
    assert size_below(tmp_path / "one.py") == size_of(_SOURCE)


def test_packages_have_a_row_each() -> None:
    rows = [line.split() for line in table(["transforms", "remat"]).splitlines()[1:]]
    assert [row[0] for row in rows] == ["transforms", "remat"]
    assert all(int(row[2]) > 1000 for row in rows)


def test_names_in_a_shared_file(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        _SOURCE + "\n\ndef other(name):\n    if name:\n        return function(1)\n"
    )
    # The class with its value, the function with what is in it, and where it is called.
    assert size_below(tmp_path / "one.py::Name") == Size(1, 2)
    assert size_below(tmp_path / "one.py::function") == Size(1, 4 + 1)


def test_what_is_counted_together_is_there() -> None:
    assert all(size_below(ROOT / place).statements for place in BY_HAND)
