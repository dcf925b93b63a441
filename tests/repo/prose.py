"""Sentences and headings of the pages, docstrings and messages: `python -m tests.repo.prose [FOLDER]`."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONG = 25
# What stands for one word: code, links, formulas.
_CODE = re.compile(r"``?[^`\n]+``?")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_END = re.compile(r"(?<=[.!?])[\"')\]*]*\s+(?=[\"'(\[]*[A-Z0-9`*_])")


def pages(root: Path = ROOT) -> list[Path]:
    """What a reader opens; not the changelog, and not pages of measured tables."""
    found = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    return sorted(path for path in found if path.exists())


def sources(root: Path = ROOT) -> list[Path]:
    found = [*(root / "remat").rglob("*.py"), *(root / "transforms").rglob("*.py")]
    return sorted({path.resolve() for path in found})


def headings(text: str) -> list[str]:
    return re.findall(r"^#+\s+(.*?)\s*$", _without_code(text), re.MULTILINE)


def _without_code(text: str) -> str:
    text = re.sub(r"^[ \t]*(```|~~~)[^\n]*\n.*?^[ \t]*\1[ \t]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def paragraphs(text: str) -> Iterator[str]:
    """Running text. A list item or a table's cell is a paragraph; code and headings are left out."""
    lines: list[str] = []
    for line in [*_without_code(text).splitlines(), ""]:
        bare = line.strip()
        starts = re.match(r"([-*+]|\d+\.)\s", bare)
        skipped = (
            not bare
            or bare.startswith(("#", "|", ">>>", "...", ":::"))
            or line.startswith("    ")
            and not lines
        )
        if (skipped or starts) and lines:
            yield " ".join(lines)
            lines = []
        if bare.startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", bare) if re.search(r"\w", cell))
        elif not skipped:
            lines.append(bare[starts.end() :] if starts else bare)


def sentences(text: str) -> Iterator[str]:
    for paragraph in paragraphs(text):
        plain = _LINK.sub(r"\1", _CODE.sub(lambda m: m[0].replace(" ", "\u00a0"), paragraph))
        yield from (part for part in _END.split(plain) if part.strip())


def words(sentence: str) -> int:
    return len([word for word in sentence.split(" ") if re.search(r"\w", word)])


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if doc := ast.get_docstring(node):
                yield itemized(doc)


def itemized(doc: str) -> str:
    """A docstring whose arguments and attributes are list items."""
    lines = []
    for line in doc.splitlines():
        section = re.fullmatch(r"(Args|Attributes|Returns|Raises|Example):", line)
        item = re.match(r"    (?=[\w*`][\w*, `.]*: )", line)
        lines.append("" if section else f"- {line[4:]}" if item else line.removeprefix("        "))
    return "\n".join(lines)


def messages(path: Path) -> Iterator[str]:
    """The texts of what is raised or warned; a value in one of them is one word."""
    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        if not (isinstance(node, ast.Raise) or name.endswith(("warn", "Error"))):
            continue
        for arg in call.args:
            if isinstance(arg, ast.JoinedStr):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in arg.values)
            elif isinstance(arg, ast.Constant) and isinstance(arg.value, str) and " " in arg.value:
                yield arg.value


def long_sentences(texts: Iterator[str]) -> tuple[int, list[str]]:
    """How many sentences there are, and those over the limit, longest first."""
    found = [sentence for text in texts for sentence in sentences(text)]
    return len(found), sorted((s for s in found if words(s) > LONG), key=words, reverse=True)


def main(folder: str = str(ROOT), show: str = "0") -> None:
    root = Path(folder)
    kinds = {
        "pages": (path.read_text() for path in pages(root)),
        "docstrings": (doc for path in sources(root) for doc in docstrings(path)),
        "messages": (text for path in sources(root) for text in messages(path)),
    }
    for kind, texts in kinds.items():
        count, found = long_sentences(texts)
        print(f"{kind:<11}{count:>6} sentences{len(found):>5} over {LONG} words")
        for sentence in found[: int(show)]:
            print(f"    {words(sentence):>3}  {sentence}")
    print("headings  ", sum(len(headings(path.read_text())) for path in pages(root)))


if __name__ == "__main__":
    main(*sys.argv[1:])
