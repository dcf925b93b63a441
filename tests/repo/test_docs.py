"""Every block of code on the pages runs, and prints or raises what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import tyro

from tests.repo import blocks
from tests.tools.inside import command_of

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


COMMANDS = [
    line for page in PAGES for line in re.findall(r"^ +python -m remat (.+)$", page.read_text(), re.M)
]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_line_of_the_command_line_is_understood(line: str) -> None:
    name, *args = shlex.split(line)
    command = command_of(name)
    # What follows a program's name belongs to the program.
    args = command.split(args)[0] if hasattr(command, "split") else args
    assert isinstance(tyro.cli(command, args=args), command)


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


# -- the pages that users read ----------------------------------------------------------------------------

DOCS = ROOT / "docs"
MENU = re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text().partition("nav:\n")[2])
# What new users ask, and where they find the answer: a page with a heading, and words of the answer.
QUESTIONS = {
    "How do I install it and see that it works?": (
        "index.md",
        "half-the-peak-in-five-commands",
        "pip install",
    ),
    "What does my model keep, and why?": ("choosing.md", "explain", "the line that made them"),
    "Which policy do I take?": ("choosing.md", "choosing-a-policy", "save_matmuls | save_attention"),
    "Why did it not save memory?": ("choosing.md", "it-did-not-save-memory", "one region around everything"),
    "How do I fit a model into 80 GB?": ("planner.md", "fit-a-model-in-one-call", "remat.fit("),
    "Does my step fit a card that I do not have?": ("planner.md", "plan-for-a-gpu-without-a-gpu", "meta"),
    "I use torch.utils.checkpoint: what changes?": ("from-torch.md", "what-changes", "use_reentrant"),
    "Does it work under torch.compile?": (
        "compile.md",
        "check-that-a-recomputation-survived",
        "assert_recomputed",
    ),
    "Does it work with FSDP?": ("distributed.md", "fsdp2", "fully_shard"),
    "How do I use it with Hugging Face's Trainer?": (
        "huggingface.md",
        "transformerstrainer",
        "huggingface.enable",
    ),
    "What does this error mean?": ("limits.md", "errors", "RematError"),
}


def slug(heading: str) -> str:
    """The anchor that Python-Markdown gives a heading."""
    text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def headings(page: str) -> list[str]:
    return [slug(found) for found in re.findall(r"^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", page), re.M)]


def test_the_menu_has_twelve_pages_and_180_kb() -> None:
    guides = [page for page in MENU if not page.startswith("api/")]
    assert len(guides) <= 12 and len(set(MENU)) == len(MENU)
    assert sum((DOCS / page).stat().st_size for page in MENU) <= 180_000


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_two_clicks_away(question: str) -> None:
    page, heading, answer = QUESTIONS[question]
    text = (DOCS / page).read_text()
    assert heading in headings(text) and answer in text
    front = (DOCS / "index.md").read_text()
    first = {"index.md", *(MENU), *re.findall(r"\]\(([\w/-]+\.md)", front)}
    # One click on the menu or a link, and one on a heading.
    assert page in first


def test_the_front_page_and_readme_say_once_where_to_start() -> None:
    for page in (DOCS / "index.md", ROOT / "README.md"):
        assert len(re.findall(r"[Ss]tart here", page.read_text())) == 1


def test_ten_minutes_have_nine_concepts() -> None:
    """Each is in bold type where the page says what it is."""
    concepts = re.findall(r"\*\*([^*]+)\*\*", (DOCS / "tutorial.md").read_text())
    assert 5 <= len(concepts) <= 9 and len(set(concepts)) == len(concepts)


def test_pages_link_to_headings_that_are_there() -> None:
    pages = {
        page: page.read_text() for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    }
    wrong = []
    for page, text in pages.items():
        for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)", text):
            path = (page.parent / target).resolve() if target else page
            made = "api" in path.parts and path.parent.name == "api"
            if not path.exists() and not made:
                wrong.append((page.name, target))
            elif anchor and path in pages and anchor not in headings(pages[path]):
                wrong.append((page.name, f"{target}#{anchor}"))
    assert not wrong
