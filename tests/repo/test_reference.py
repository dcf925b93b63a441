"""Every public name has a page, an example that runs, and types."""

from __future__ import annotations

import doctest
import re

import pytest

pytest.importorskip("griffe")

from tests.repo import reference  # noqa: E402

# A deprecated name says what to write in its place, and has no page.
PUBLIC = [
    path
    for path in reference.public()
    if not reference.docstring(reference.named(path)).startswith("Deprecated:")
]
OBJECTS = {reference.named(path).path: path for path in PUBLIC}


def test_there_are_public_names():
    assert len(OBJECTS) > 50
    assert {"remat.remat", "remat.plan.pareto", "remat.nn.apply"} <= set(PUBLIC)


def test_names_and_signatures_are_those_written_down():
    now, before = set(reference.snapshot()), set(reference.SNAPSHOT.read_text().splitlines())
    changed = f"new: {sorted(now - before)}, gone: {sorted(before - now)}"
    assert now == before, f"{changed}. Say so in CHANGELOG.md, and run `make api`."


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("remat.never_said(x: int) -> int", "never_said"),
        ("remat.Policy.never_said: bool", "never_said"),
        ("remat.save_unbatched_matmuls: Policy", None),
    ],
)
def test_a_name_that_changes_needs_a_line_in_the_changelog(gone, told, tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "SNAPSHOT", tmp_path / "names.txt")
    reference.SNAPSHOT.write_text("\n".join([gone, *reference.snapshot()]))
    if told:
        with pytest.raises(SystemExit, match=told):
            reference.renew()
    else:
        reference.renew()
        assert reference.SNAPSHOT.read_text().splitlines() == reference.snapshot()


def test_every_public_name_has_a_page():
    pages = reference.pages()
    assert not [path for own, path in OBJECTS.items() if own not in pages]


def test_no_page_shows_a_file_in_place_of_its_function():
    # `remat.explain` is a file for griffe, and the function in it for users.
    modules = {reference.named(path).path for path in reference.public() if reference.named(path).is_module}
    for page in (reference.ROOT / "docs" / "api").glob("*.md"):
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            shown = reference.package()[path.removeprefix("remat.")] if path != "remat" else None
            assert shown is None or not shown.is_module or shown.path in modules, path


def test_every_public_name_says_what_it_is():
    assert not [path for own, path in OBJECTS.items() if not reference.docstring(reference.named(path))]


def test_every_public_name_has_an_example():
    found = {path: reference.named(path) for path in OBJECTS.values()}
    assert not [
        path for path, one in found.items() if not one.is_module and ">>>" not in reference.docstring(one)
    ]


def test_every_public_name_has_types():
    found = {path: reference.untyped(reference.named(path)) for path in OBJECTS.values()}
    assert not {path: missing for path, missing in found.items() if missing}


@pytest.mark.parametrize("path", [p for p in OBJECTS.values() if not reference.named(p).is_module])
def test_example_runs(path):
    text = reference.docstring(reference.named(path))
    test = doctest.DocTestParser().get_doctest(text, {}, path, None, None)
    # Dynamo clears what it put into the globals when it goes, so they are left to it.
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, clear_globs=False)
    assert result.failed == 0
