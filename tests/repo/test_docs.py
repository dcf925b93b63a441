"""Every block of code on the pages runs, and prints or raises what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.repo import blocks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]


def marks(page: Path) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if "<!-- slow -->" in page.read_text() else []


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem, marks=marks(page)) for page in WITH_CODE])
def test_page(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    others = [blocks.other_version(part) for _, part in blocks.parts(page.read_text())]
    if all(others):
        pytest.skip(f"the page was printed with another version of {others[0]}")
    monkeypatch.chdir(tmp_path)
    blocks.run(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pictures_are_there_and_small(page: Path) -> None:
    pictures = {page.parent / link for link in re.findall(r"!\[[^]]*\]\(([^):]+)\)", page.read_text())}
    assert all(picture.stat().st_size < 250_000 for picture in pictures)
    # With the theme's own half a megabyte a page stays under one.
    assert sum(picture.stat().st_size for picture in pictures) < 500_000


PAGE = """
<!-- before:
x = 3
-->
```python
print(x + 1)
```
prints

```text
4
```

```python title="Raises"
raise ValueError("two words")
```

```text
ValueError: two
words
```
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [("\n4\n", "\n5\n"), ("two\nwords", "one word"), ("x = 3", "x = 4"), ('"Raises"', '"Prints"')],
)
def test_a_wrong_page_is_seen(tmp_path: Path, old: str, new: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    blocks.run(page)
    page.write_text(PAGE.replace(old, new))
    with pytest.raises(AssertionError):
        blocks.run(page)
