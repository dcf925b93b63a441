"""How much code there is: statements, lines and docstrings of each package.

    make size
    python -m benchmarks.size transforms/scan transforms/compiled

A statement is a node of `ast.stmt`, but for docstrings and bare constants (`...`). Names, line breaks and
comments do not change the number, so it says more than lines do. `documented` is the share of modules,
classes and functions that have a docstring, and `in docstrings` the share of lines that belong to docstrings.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("transforms", "remat", "benchmarks", "tests", "docs", "examples")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Size:
    """What sources hold.

    Attributes:
        files: how many there are.
        statements: nodes of `ast.stmt` but docstrings and bare constants.
        lines: all lines, empty ones and comments too.
        places: modules, classes and functions, each of which may have a docstring.
        docstrings: how many do.
        docstring_lines: the lines that docstrings take.
    """

    files: int = 0
    statements: int = 0
    lines: int = 0
    places: int = 0
    docstrings: int = 0
    docstring_lines: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def size_of(source: str) -> Size:
    """The size of one file."""
    statements = places = docstrings = docstring_lines = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            statements += not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        if isinstance(node, _DOCUMENTED):
            places += 1
            if ast.get_docstring(node, clean=False) is not None:
                text = node.body[0]
                docstrings += 1
                docstring_lines += (text.end_lineno or text.lineno) - text.lineno + 1
    return Size(1, statements, len(source.splitlines()), places, docstrings, docstring_lines)


def size_below(place: Path) -> Size:
    """The size of all Python files below a folder, or of a file.

    Links to folders, such as `remat/transforms`, are not followed: what they lead to counts where it lies.
    """
    found = [place] if place.is_file() else _sources(place)
    return sum((size_of(path.read_text()) for path in found), Size())


def _sources(folder: Path) -> Iterable[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def table(places: Sequence[str]) -> str:
    """A row for each folder or file, named from the root of the repository."""
    rows = [f"{'':28}{'files':>7}{'statements':>12}{'lines':>8}{'documented':>12}{'in docstrings':>15}"]
    for name in places:
        s = size_below(ROOT / name)
        documented, share = s.docstrings / max(1, s.places), s.docstring_lines / max(1, s.lines)
        rows.append(f"{name:28}{s.files:7}{s.statements:12}{s.lines:8}{documented:12.1%}{share:15.1%}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.size", description=__doc__)
    parser.add_argument("places", nargs="*", default=PACKAGES, help="folders or files; all packages if none")
    print(table(parser.parse_args().places))


if __name__ == "__main__":
    main()
