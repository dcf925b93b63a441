"""How much code there is: statements, lines and docstrings of each package.

    make size
    python -m benchmarks.size transforms/scan transforms/compiled
    python -m benchmarks.size --by-hand  # what others do by hand: tiles, roles, inputs on the host

A statement is a node of `ast.stmt`, but for docstrings and bare constants (`...`). Names, line breaks and
comments do not change the number, so it says more than lines do. `documented` is the share of modules,
classes and functions that have a docstring, and `in docstrings` the share of lines that belong to docstrings.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("transforms", "remat", "benchmarks", "tests", "docs", "examples")
# What was added for tiles, the loss head, inputs on the host, modules and roles, associative scans: whole
# files, and in shared ones the definitions of these names and the statements that name them.
BY_HAND = (
    *("remat/_scan/tiles.py", "remat/_scan/mixing.py", "remat/_scan/tile_bytes.py", "remat/losses.py"),
    *("remat/_scan/associative.py", "remat/presets.py", "remat/policies/_modules.py"),
    "remat/_torch/modules.py::_NODE module_path _matrix_of _matrix_in _name_in _path_in paths_of"
    " re Iterable Sequence storage_key unwrapped",
    "transforms/offload/transfer.py::INPUT _Queue _queue Parcel.source leave watched storage Parcel.now"
    " Parcel.take.sent to_host.error Away.__bool__ send.known send.place collections threading",
    "transforms/tape/kept_values.py::INPUT",
    "transforms/compiled/record.py::INPUT",
    "transforms/compiled/barrier.py::waits _waiting hosts Sent.before Sent.one Sent.fence_below",
    "transforms/scan/spec.py::joined unroll ScanSpec.stack math",
    "transforms/scan/body.py::at_once",
    "transforms/scan/function.py::at_once _at_once",
    "remat/_scan/scan.py::unroll",
    "remat/_dynamo/region.py::naming_inputs INPUT named",
    "remat/_region.py::inputs Inputs sends naming naming_inputs HostInputs",
    "remat/_api.py::inputs Inputs modules RuleOfModules",
    "remat/policies/_base.py::needs_modules unmet sends_inputs",
    "remat/policies/_selective.py::HostInputs LEAST_BYTES INPUT",
    "remat/policies/_selector.py::_module modules _unmet INPUT module_path needs_modules",
    "remat/policies/_makers.py::save_modules",
    "remat/policies/__init__.py::ROLES RuleOfModules by_role role_of save_modules HostInputs",
    "remat/_core/__init__.py::fits starred",
    "remat/_core/opinfo.py::module _module",
    "remat/_torch/__init__.py::module_path paths_of",
    "remat/interop/torchtitan.py::presets save_modules",
    "remat/_scan/__init__.py::tiled Tiled check_tiles associative_scan_remat",
)
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


def statements_of(source: str, names: Collection[str]) -> int:
    """The statements that define these names, with all inside, and the other ones that name them.

    `Parcel.source` is a name in the definition of `Parcel` alone. Heads of other definitions, and imports of
    other names too, do not count: they were there before, with fewer words.
    """

    def named(node: ast.AST, names: Collection[str]) -> bool:
        said = {getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname")}
        below = (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt))
        return not said.isdisjoint(names) or any(named(child, names) for child in below)

    def count(node: ast.AST, names: Collection[str]) -> int:
        own = isinstance(node, ast.stmt) and named(node, names)
        if isinstance(node, _DOCUMENTED[1:]):
            if node.name in names:
                return size_of(ast.unparse(node)).statements
            own, names = False, {name.removeprefix(f"{node.name}.") for name in names}
        elif isinstance(node, ast.ImportFrom):
            own = all(alias.name in names for alias in node.names)
        return own + sum(count(child, names) for child in ast.iter_child_nodes(node))

    return count(ast.parse(source), names)


def size_below(place: Path) -> Size:
    """The size of all Python files below a folder, or of a file.

    Links to folders, such as `remat/transforms`, are not followed: what they lead to counts where it lies.
    """
    path, _, names = str(place).partition("::")
    if names:
        return Size(1, statements_of(Path(path).read_text(), names.split()))
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
    parser.add_argument("--by-hand", action="store_true", help="what was added for what people do by hand")
    args = parser.parse_args()
    if args.by_hand:
        print(sum(size_below(ROOT / place).statements for place in BY_HAND), "statements")
    else:
        print(table(args.places))


if __name__ == "__main__":
    main()
