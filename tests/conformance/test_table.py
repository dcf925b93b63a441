"""The tables of other libraries' tests are those that the marks on tests give."""

import pytest

from tests.conformance.rows import TABLES, pages, rows_of


@pytest.mark.parametrize("page", sorted({table.page for table in TABLES.values()}))
def test_the_committed_page_is_what_the_marks_give(page):
    for path, text in pages().items():
        if path.name == page:
            assert path.read_text() == text, "write it by python -m tests.conformance.rows"


@pytest.mark.parametrize("suite", TABLES)
def test_every_row_is_there_once(suite):
    rows = rows_of(suite)
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.kind in ("pass", "adapted", "refused on purpose", "no meaning") for row in rows)
    assert suite != "jax" or [row.number for row in rows] == list(range(1, 81))
