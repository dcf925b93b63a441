"""The code on pages: blocks of python, what they print, and what they raise.

A page's blocks run one after the other in one namespace. What a block prints stands in the `text` block after
it. A block with `title="Raises"` ends with an error, whose class and message are in the `text` block after
it, with line breaks anywhere. Comments say the rest:

- `<!-- before: CODE -->` runs and is not shown: what the page takes for granted.
- `<!-- anew -->` begins a part of the page with names and random numbers of its own.
- `<!-- slow -->` marks a page that takes seconds.
- `<!-- versions: torch 2.13.0 -->` marks a part whose output is that of these versions: with others it is
  left out.

A block titled "Needs PACKAGE" is compiled and not run where that package is missing.

    python -m tests.repo.blocks docs/tutorial.md     # writes what the blocks print into the page
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_PART = re.compile(
    r"<!-- before:\n(?P<hidden>.*?)-->"
    r"|^(?P<indent>[ \t]*)```(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_ANEW = "<!-- anew -->"
_TITLE = re.compile(r'title="([^"]*)"')


@dataclass
class Block:
    """One block of code, and where in the page the text that follows it lies, if any does."""

    line: int
    code: str
    title: str = ""
    shown: str = ""
    indent: str = ""
    span: tuple[int, int] | None = None

    @property
    def raises(self) -> bool:
        return self.title == "Raises"


def blocks(page: str) -> Iterator[Block]:
    found: Block | None = None
    for part in _PART.finditer(page):
        line = page[: part.start()].count("\n") + 2
        if part["hidden"] is not None:
            if found is not None:
                yield found
                found = None
            yield Block(line, part["hidden"], "before")
            continue
        language, _, rest = part["info"].partition(" ")
        code = textwrap.dedent(part["code"])
        if language == "text" and found is not None and found.span is None:
            found.shown, found.span, found.indent = code, part.span("code"), part["indent"]
        elif language == "python":
            if found is not None:
                yield found
            title = _TITLE.search(rest)
            found = Block(line, code, title[1] if title else "")
    if found is not None:
        yield found


def versions(page: str) -> dict[str, str]:
    """The versions that a page's output is of."""
    named = re.search(r"<!-- versions: (.*?) -->", page)
    return dict(pair.split() for pair in named[1].split(", ")) if named else {}


def other_version(page: str) -> str | None:
    """A package that is missing here, or there in another version."""
    for package, version in versions(page).items():
        if importlib.util.find_spec(package) is None:
            return package
        if importlib.metadata.version(package).partition("+")[0] != version:
            return package
    return None


def parts(page: str) -> Iterator[tuple[int, str]]:
    """The parts of a page that run apart, and where each begins."""
    at = 0
    for part in page.split(_ANEW):
        yield at, part
        at += len(part) + len(_ANEW)


def results(path: Path) -> Iterator[tuple[Block, str]]:
    """Run a page's blocks; what each printed, or the error that a block titled "Raises" ended with."""
    page = path.read_text()
    for at, part in parts(page):
        if not other_version(part):
            yield from _results(path, part, at, page[:at].count("\n"))


def _results(path: Path, part: str, at: int, lines: int) -> Iterator[tuple[Block, str]]:
    names: dict[str, object] = {"__name__": "__main__"}
    torch.manual_seed(0)
    for block in blocks(part):
        block.line += lines
        if block.span is not None:
            block.span = block.span[0] + at, block.span[1] + at
        where = f"{path.name}:{block.line}"
        # Lines of the block count from 1, as a reader counts them.
        code = compile(block.code, "example.py", "exec")
        if block.title.startswith("Needs ") and not importlib.util.find_spec(block.title.split()[1].lower()):
            continue
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(code, names)
        except Exception as error:
            if not block.raises:
                raise AssertionError(f"{where} raised {type(error).__name__}: {error}") from error
            yield block, f"{type(error).__name__}: {error}"
        else:
            assert not block.raises, f"{where} raised nothing"
            yield block, out.getvalue()


def run(path: Path) -> None:
    """Hold what a page's blocks print and raise against what the page shows.

    Raises:
        AssertionError: a block prints or raises something else than the page says.
    """
    for block, got in results(path):
        same = block.shown.split() == got.split() if block.raises else block.shown == got
        assert same, f"{path.name}:{block.line} gives\n{got}"


def write(path: Path) -> None:
    """Put what the blocks print and raise into the page."""
    page = path.read_text()
    for block, got in reversed(list(results(path))):
        if block.span is None:
            assert not got, f"{path.name}:{block.line} prints, and no text block follows it:\n{got}"
            continue
        if block.raises:
            got = "\n".join(textwrap.wrap(" ".join(got.split()), 100, break_long_words=False)) + "\n"
        page = page[: block.span[0]] + textwrap.indent(got, block.indent) + page[block.span[1] :]
    path.write_text(page)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name))
