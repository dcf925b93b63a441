"""Who imports whom in the two packages, read from the sources."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.repo.reference import MODULES, OF_THE_ENGINE

ROOT = Path(__file__).parents[2]
ENGINE = "remat.transforms"
# Modules that users import by their own name; each is a face of one file.
OPEN = {"remat.interop.huggingface", "remat.interop.jax"}


@dataclass(frozen=True)
class Import:
    """One name that a module imports; `name` is None for `import module`."""

    importer: str
    line: int
    target: str
    name: str | None


@functools.cache
def modules() -> dict[str, Path]:
    """All modules of the packages, by import name; the link remat/transforms is not walked through."""
    found = {}
    for folder, name in ((ROOT / "remat", "remat"), (ROOT / "transforms", ENGINE)):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if name == "remat" and parts[0] == "transforms":
                continue
            found[".".join([name, *(part for part in parts if part != "__init__")])] = path
    return found


@functools.cache
def tree(path: Path) -> ast.Module:
    gc.freeze()  # each of so many nodes would make Python search all that are there for garbage
    return ast.parse(path.read_text(), str(path))


def is_face(module: str) -> bool:
    return modules()[module].name == "__init__.py"


def room(module: str) -> str:
    """The package in whose folder a module lies; a face belongs to its own room."""
    return module if is_face(module) else module.rpartition(".")[0]


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements anywhere, also in functions; not those for type checkers only."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        if part == "body" and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        for child in getattr(node, part, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from _statements(child)


def _found(importer: str, node: ast.stmt) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name in modules():
                yield Import(importer, node.lineno, alias.name, None)
    if not isinstance(node, ast.ImportFrom):
        return
    source = node.module or ""
    if node.level:
        package = room(importer).split(".")
        source = ".".join([*package[: len(package) - node.level + 1], *source.split(".")]).rstrip(".")
    for alias in node.names:
        inner = f"{source}.{alias.name}"
        if inner in modules() and not _binds(source, alias.name):
            yield Import(importer, node.lineno, inner, None)
        elif source in modules():
            yield Import(importer, node.lineno, source, alias.name)


@functools.cache
def _names(module: str) -> frozenset[str]:
    """What a module binds by `from ... import` and by definitions at its top."""
    names = set()
    for node in tree(modules()[module]).body:
        if isinstance(node, ast.ImportFrom):
            inner = [a for a in node.names if f"{node.module}.{a.name}" not in modules()]
            names.update(a.asname or a.name for a in inner)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return frozenset(names)


def _binds(module: str, name: str) -> bool:
    """Whether `from module import name` gets a name of the module, not the submodule of that name."""
    return module in modules() and name in _names(module)


@functools.cache
def imports() -> tuple[Import, ...]:
    return tuple(
        found
        for module, path in modules().items()
        for node in _statements(tree(path))
        for found in _found(module, node)
    )


def graph() -> dict[str, set[str]]:
    """Edges of the import graph: what a module names, and the faces that Python runs on the way there."""
    edges: dict[str, set[str]] = {module: set() for module in modules()}
    for found in imports():
        target = found.target
        while target:
            if target == found.target or not within(found.importer, target):
                edges[found.importer].add(target)
            target = target.rpartition(".")[0]
    return edges


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected parts of more than one module, and modules that import themselves."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    parts: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            part = stack[at:]
            del stack[at:]
            if len(part) > 1 or node in edges[node]:
                parts.append(sorted(part))

    for node in edges:
        if node not in index:
            visit(node)
    return parts


def back_doors() -> list[Import]:
    """Imports of files of other rooms, and of the face of a room from within it.

    A file may be imported within its own room and by the rooms that lie in it: what is common to a house
    lies in its root.
    """
    found = []
    for one in imports():
        home = room(one.importer)
        if one.target in OPEN:
            bad = False
        elif is_face(one.target):
            bad = within(home, one.target) and one.importer != one.target
        else:
            bad = not within(home, room(one.target))
        if bad:
            found.append(one)
    return found


def unshown() -> list[Import]:
    """What `remat/` takes from a face of the engine that does not list it."""
    return [
        one
        for one in imports()
        if not within(one.importer, ENGINE) and within(one.target, ENGINE) and one.name is not None
        if one.name not in _names(one.target)
    ]


def _private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def private_torch(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every private name of torch in a file."""
    roots: dict[str, str] = {}  # local name -> the dotted name that it stands for
    nodes = list(ast.walk(tree(path)))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    roots[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    if any(map(_private, alias.name.split("."))):
                        yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                roots[alias.asname or alias.name] = full
                if any(map(_private, full.split("."))):
                    yield node.lineno, full
    for node in nodes:
        if isinstance(node, ast.Attribute) and _private(node.attr):
            chain: list[str] = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                chain.insert(0, inner.attr)
                inner = inner.value
            # Names below torch.ops are those of schemas.
            if isinstance(inner, ast.Name) and inner.id in roots and chain[0] != "ops":
                yield node.lineno, ".".join([roots[inner.id], *chain])


def classes() -> Iterator[tuple[str, str]]:
    """The name of every class, and the module that defines it."""
    for module, path in modules().items():
        for node in _statements(tree(path)):
            if isinstance(node, ast.ClassDef):
                yield node.name, module


def reads_inside(path: Path) -> set[str]:
    """The modules of the library, of those that are not public, from which a file of tests takes names."""
    found = [one for node in _statements(tree(path)) for one in _found("", node)]
    return {
        one.target
        for one in found
        if one.target not in {*MODULES, *OPEN} and f"{one.target}.{one.name}" not in OF_THE_ENGINE
    }
