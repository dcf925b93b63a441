"""Pages are written in short sentences, and headings name their subject."""

from __future__ import annotations

import pytest

from tests.repo import prose

# What was to be guessed at: an inversion, a riddle, a word that the field does not use.
RIDDLES = (
    "looking",
    "the ready ones",
    "makers",
    "what goes wrong says so",
    "gflop again",
    "measured",
    "did it survive?",
)


def test_sentences_on_pages_are_short():
    _, long = prose.long_sentences(page.read_text() for page in prose.pages())
    assert not long, "\n".join(long)


def test_sentences_of_messages_are_short():
    _, long = prose.long_sentences(text for path in prose.sources() for text in prose.messages(path))
    assert not long, "\n".join(long)


def test_sentences_of_public_docstrings_are_short():
    reference = pytest.importorskip("tests.repo.reference")
    pytest.importorskip("griffe")
    public = {reference.docstring(reference.named(path)) for path in reference.public()}
    _, long = prose.long_sentences(prose.itemized(text) for text in public)
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", prose.pages(), ids=lambda page: page.stem)
def test_headings_name_their_subject(page):
    assert not [heading for heading in prose.headings(page.read_text()) if heading.lower() in RIDDLES]


def test_sentences_are_counted():
    text = "# A heading\n\nOne `two three` four. Five\nsix.\n\n- **Seven.** Eight (nine).\n"
    assert [prose.words(s) for s in prose.sentences(text)] == [3, 2, 1, 2]
    assert prose.headings(text) == ["A heading"]
