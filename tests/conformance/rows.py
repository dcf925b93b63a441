"""Tables of other libraries' tests: each test here says which of theirs it is, and what becomes of it.

`python -m tests.conformance.rows` writes the tables into docs/measured/jax-tests.md and
docs/measured/trust.md. A test without a mark of its own is the one of its name, and passes; of a dictionary
of programs each name is such a test.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@dataclass
class Row:
    """`kind`: pass, adapted, refused on purpose or no meaning; `note`: what is asserted, or why not."""

    name: str
    kind: str
    note: str
    where: str
    number: int = 0


@dataclass(frozen=True)
class Table:
    """`files` by the letters that the page has for them; `head` ends in the two columns of every table."""

    page: str
    head: str
    files: dict[str, str]


TABLES = {
    "jax": Table(
        "measured/jax-tests.md",
        "| # | JAX's test | | where | what is asserted, or why not |",
        {"R": "jax_remat", "K": "jax_calls", "P": "jax_policies", "C": "jax_control_flow", "L": "jax_loops",
         "T": "jax_compiled"},
    ),
    "torch": Table(
        "measured/trust.md",
        "| torch's test | | where | note |",
        {"C": "torch_checkpoint", "N": "torch_nested", "U": "torch_utils", "S": "torch_selective",
         "T": "torch_tags", "D": "torch_compiled", "B": "torch_breaks", "G": "torch_one_graph"},
    ),
    "equinox": Table("measured/trust.md", "| equinox's test | | note |", {"E": "equinox"}),
    "torch_remat": Table(
        "measured/trust.md",
        "| torch_remat's test | | note |",
        {"A": "torch_remat", "B": "torch_remat_calls", "C": "torch_remat_hooks"},
    ),
}  # fmt: skip
NO_MEANING = Row(
    "remat_jit_static_argnum_omnistaging",
    "no meaning",
    "a historical test of JAX's tracing, without remat",
    "",
    20,
)


def row(kind: str, note: str = "", *, name: str = "") -> pytest.MarkDecorator:
    """`name`: one or several, if the test here has another."""
    return pytest.mark.conformance(*(Row(one, kind, note, "") for one in name.split() or [""]))


def jax(number: int, kind: str = "", note: str = "", *, name: str = "") -> pytest.MarkDecorator:
    """A test of JAX's by its number; what becomes of it is said once, where several tests here are of it."""
    return pytest.mark.conformance(Row(name, kind, note, "", number))


def rows_of(suite: str) -> list[Row]:
    found = [made for letter, stem in TABLES[suite].files.items() for made in _rows(suite, letter, stem)]
    if suite != "jax":
        return found
    by_number = {NO_MEANING.number: NO_MEANING}
    for one in sorted(found, key=lambda one: one.kind == ""):
        if one.number in by_number:
            by_number[one.number].where += f", {one.where}"
        else:
            by_number[one.number] = one
    return [by_number[number] for number in sorted(by_number)]


def _rows(suite: str, letter: str, stem: str) -> Iterator[Row]:
    module = importlib.import_module(f"tests.conformance.test_{stem}")
    for name, fn in vars(module).items():
        if not name.startswith("test_") or getattr(fn, "__module__", "") != module.__name__:
            continue
        marks: list[Any] = list(getattr(fn, "pytestmark", ()))[::-1]
        said = [one for mark in marks if mark.name == "conformance" for one in mark.args]
        values = [mark.args[1] for mark in marks if mark.name == "parametrize"]
        programs = list(dict.fromkeys(one for given in values for one in _names(given)))
        named = {one.name for one in said}
        if not said and not programs and suite != "jax":
            yield Row(name, "pass", "", letter)
        for one in said:
            known = one.name or (name.removeprefix("test_") if suite == "jax" else name)
            yield Row(known, one.kind, one.note, letter, one.number)
        yield from (Row(one, "pass", "", letter) for one in programs if one not in named)


def _names(values: Any) -> Iterator[str]:
    """Those of torch's tests among the values of a parameter."""
    for value in values:
        first = getattr(value, "values", [value])[0] if not isinstance(value, str) else value
        if isinstance(first, str) and first.startswith("test_"):
            yield first


def written(suite: str) -> str:
    """The table, and how many rows are of each kind."""
    table, rows = TABLES[suite], rows_of(suite)
    lines = [table.head, re.sub(r"[^|]+", "---", table.head)]
    for one in rows:
        where = {"jax": f" {one.where} |", "torch": f" {one.where} |"}.get(suite, "")
        number = f"| {one.number} " if suite == "jax" else ""
        lines.append(f"{number}| {one.name} | {one.kind} |{where} {one.note} |")
    kinds = Counter(one.kind for one in rows)
    words = {"pass": "pass", "adapted": "are adapted", "refused on purpose": "are refused on purpose"}
    told = [f"{kinds[kind]} {text}" for kind, text in words.items() if kinds[kind]]
    told += ["1 has no meaning"] if kinds["no meaning"] else []
    return "\n".join([*lines, "", f"{', '.join(told)}."])


def pages() -> dict[Path, str]:
    """The pages as they are with their tables."""
    texts: dict[Path, str] = {}
    for suite, table in TABLES.items():
        path = DOCS / table.page
        text = texts.get(path) or path.read_text()
        start, end = f"<!-- rows of {suite} -->", f"<!-- end of {suite} -->"
        before, _, rest = text.partition(start)
        texts[path] = f"{before}{start}\n\n{written(suite)}\n\n{end}{rest.partition(end)[2]}"
    return texts


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
