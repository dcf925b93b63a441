"""The public names, read from the sources, and their pages.

`python -m tests.repo.reference` counts them, and `--write` writes them down with their signatures.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Modules that users import from. Of the last one three names are public; the rest is for the other rooms.
MODULES = (
    "remat",
    *(
        f"remat.{name}"
        for name in ("debug", "gpu", "jax_names", "losses", "nn", "plan", "policies", "presets", "schedules")
    ),
    *(f"remat.interop{name}" for name in ("", ".huggingface", ".torchtitan")),
)
OF_THE_ENGINE = tuple(f"remat.transforms.{name}" for name in ("RematError", "grad", "value_and_grad"))


@functools.cache
def package() -> Any:
    """The package as griffe reads it: no module is imported, so torchtitan need not be there."""
    import griffe

    loader = griffe.GriffeLoader(search_paths=[ROOT])
    found = loader.load("remat")
    loader.resolve_aliases(external=False)
    return found


def named(path: str) -> Any:
    """The object of a dotted path, aliases followed."""
    found = package()[path.removeprefix("remat.")] if path != "remat" else package()
    found = found.final_target if found.is_alias else found
    # A file named after the one function in it, which the face shows: `explain.explain`.
    alone = found.is_module and not found.is_init_module
    inner = found.members.get(found.name) if alone else None
    return inner if inner is not None and inner.is_function else found


def public() -> Iterator[str]:
    for module in MODULES:
        exports = named(module).exports
        assert exports, f"{module} has no __all__"
        yield from (f"{module}.{name}" for name in exports)
    yield from OF_THE_ENGINE


def pages() -> dict[str, str]:
    """Where each object is documented: its own dotted path, and the page."""
    found = {}
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        text = page.read_text()
        for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
            found[named(path).path] = page.name
        for path in re.findall(r"^#+ .*`(remat\.[\w.]+)`", text, re.MULTILINE):
            found.setdefault(named(path).path, page.name)
    return found


def docstring(found: Any) -> str:
    return found.docstring.value if found.docstring else ""


def untyped(found: Any) -> list[str]:
    """What of a function has no annotation, or of a class's fields and public methods."""
    if found.is_class:
        methods = [m for name, m in found.members.items() if not name.startswith("_") and m.is_function]
        return [f"{m.name}: {one}" for m in methods for one in untyped(m)]
    if not found.is_function:
        return []
    parameters = [p.name for p in found.parameters if p.name not in ("self", "cls") and p.annotation is None]
    return parameters + (["its result"] if found.returns is None else [])


SNAPSHOT = ROOT / "docs" / "api" / "names.txt"


def snapshot() -> list[str]:
    """A line for each public name with its signature, and one for each public member of a class."""
    lines: dict[str, str] = {}
    for path in sorted(public()):
        found = named(path)
        if not found.is_module and path not in lines:
            lines[path] = path + shape(found)
            members = found.members.items() if found.is_class else ()
            shown = {name: one for name, one in members if not name.startswith("_") and not one.is_alias}
            lines.update({f"{path}.{name}": f"{path}.{name}{shape(one)}" for name, one in shown.items()})
    return list(lines.values())


def shape(found: Any) -> str:
    """What stands behind a name: parameters and result, bases, or a type."""
    if found.is_function:
        return found.signature().removeprefix(found.name)
    if found.is_class:
        return f" (class of {', '.join(map(str, found.bases)) or 'object'})"
    return f": {found.annotation}" if found.annotation else ""


def renew() -> None:
    """Write the snapshot, unless the changelog says nothing of what changed."""
    before, now = SNAPSHOT.read_text().splitlines() if SNAPSHOT.exists() else [], snapshot()
    news = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    paths = {re.split(r"[(: ]", line)[0] for line in {*before} ^ {*now}}
    # A class that comes or goes is said, and its members with it.
    changed = {owner[2] for path in paths if (owner := path.rpartition("."))[0] not in paths}
    if before and (silent := sorted(name for name in changed if not re.search(rf"\b{name}\b", news))):
        sys.exit(f"CHANGELOG.md says nothing under its first version of: {', '.join(silent)}")
    SNAPSHOT.write_text("\n".join(now) + "\n")


def main() -> None:
    """The count: `python -m tests.repo.reference`."""
    if sys.argv[1:] == ["--write"]:
        renew()
    found = {named(path).path: named(path) for path in public()}
    documented, names = pages(), [one for one in found.values() if not one.is_module]
    print(f"{len(found)} public names, {len(found) - len(names)} of them modules")
    for what, count, of in (
        ("a page", sum(path in documented for path in found), len(found)),
        ("an example", sum(">>>" in docstring(one) for one in names), len(names)),
        ("all types", sum(not untyped(one) for one in names), len(names)),
    ):
        print(f"with {what:<10}{count:>4} of {of}")


if __name__ == "__main__":
    main()
