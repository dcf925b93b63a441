"""Tables of cells, rendered as plain text and as HTML."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Of a page of its own. In a notebook the page is not ours.
_BODY = """
:root { color-scheme: light dark; --line: #ddd }
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #1c1c1c; background: #fff }
.remat { overflow-x: auto }
@media (prefers-color-scheme: dark) { :root { --line: #444 } body { color: #e4e4e4; background: #1b1c20 } }
@media (max-width: 48em) { body { margin: 1em .7em; font-size: 13px } }
"""
_STYLE = """
.remat table { border-collapse: collapse; margin: .3em 0 1.5em }
.remat caption { text-align: left; font-weight: 600; padding: .2em 0 }
.remat th, .remat td { padding: .15em .7em; border-bottom: 1px solid var(--line, #8884) }
.remat th, .remat td { text-align: left; white-space: pre }
.remat .r { text-align: right; font-variant-numeric: tabular-nums }
.remat .note { border-left: 3px solid #c60; padding-left: .6em; margin: .3em 0 }
"""
_PHONE = '<meta name="viewport" content="width=device-width">'


@dataclass(frozen=True)
class Table:
    """A title, columns, and rows of text. A column whose heading starts with `>` is aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def headings(self) -> tuple[str, ...]:
        return tuple(c.removeprefix(">") for c in self.columns)

    @property
    def right(self) -> tuple[bool, ...]:
        return tuple(c.startswith(">") for c in self.columns)


@dataclass(frozen=True)
class Page:
    """What a report says: a headline, tables, and notes."""

    headline: tuple[str, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()


def as_text(page: Page, most: int = 20) -> str:
    """The page as plain text; of each table at most so many rows."""
    tables = [_text_table(table, most) for table in page.tables]
    parts = ["\n".join(page.headline), *tables, "\n".join(map(_text_note, page.notes))]
    return "\n\n".join(filter(None, parts))


def _text_note(note: str) -> str:
    return textwrap.fill(f"note: {note}", width=110, subsequent_indent="      ")


def _text_table(table: Table, most: int) -> str:
    shown = _cut(table.rows, most)
    widths = [max(map(len, column)) for column in zip(table.headings, *shown, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, table.right, strict=True)
        ]
        return ("  " + "  ".join(padded)).rstrip()

    more = [f"  ... and {len(table.rows) - len(shown)} more"] if len(shown) < len(table.rows) else []
    return "\n".join([table.title, line(table.headings), *map(line, shown), *more])


def _cut(rows: tuple[tuple[str, ...], ...], most: int) -> tuple[tuple[str, ...], ...]:
    # A line that says "one more" takes as much room as the row.
    return rows if len(rows) <= most + 1 else rows[:most]


def as_html(page: Page) -> str:
    """The page as an HTML fragment with a style of its own and all rows."""
    return f"<style>{_STYLE}</style>{_html_body(page)}"


def _html_body(page: Page) -> str:
    head = "".join(f"<p>{html.escape(line)}</p>" for line in page.headline)
    tables = "".join(map(_html_table, page.tables))
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in page.notes)
    return f'<div class="remat">{head}{notes}{tables}</div>'


def _html_table(table: Table) -> str:
    def row(tag: str, cells: Sequence[str]) -> str:
        made = [
            f"<{tag}{' class=r' if right else ''}>{html.escape(cell)}</{tag}>"
            for cell, right in zip(cells, table.right, strict=True)
        ]
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(row("td", cells) for cells in table.rows)
    caption = f"<caption>{html.escape(table.title)}</caption>"
    return f"<table>{caption}<thead>{row('th', table.headings)}</thead><tbody>{body}</tbody></table>"


def save_html(page: Page, path: str | Path, *, style: str = "", above: str = "") -> None:
    """Write the page as a file that needs nothing else; with HTML of its own `above`, and its style."""
    title = html.escape(page.headline[0])
    head = f'<meta charset="utf-8">{_PHONE}<title>{title}</title><style>{_BODY}{_STYLE}{style}</style>'
    body = f"<body>{above}{_html_body(page)}</body>"
    text = f'<!doctype html><html lang="en"><head>{head}</head>{body}</html>\n'
    Path(path).write_text(text, encoding="utf-8")


class Shown:
    """What has a `page()` prints as text, and as HTML in notebooks."""

    def page(self) -> Page:
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self.page())

    # What an interactive session shows.
    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self.page())

    def save(self, path: str | Path) -> None:
        """Write the report as one HTML file, with all rows."""
        save_html(self.page(), path)
