"""A page for every public name, made while the site is built.

The pages in `docs/api` say which names belong together: a line `::: remat.name` for each. Every such line
becomes a page of its own, and on the page where it stands a link to that page, with a summary.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
_ENTRY = re.compile(r"^::: (?P<path>[\w.]+)\n(?P<options>(?: {4}.*\n)*)\n*", re.MULTILINE)
_HEADING = re.compile(r"heading: (.+)")


class Entry(NamedTuple):
    """A public name: where its docstring is, what users call it, and how its page is rendered."""

    path: str
    name: str
    block: str

    @property
    def page(self) -> str:
        return f"{self.name}.md"

    @property
    def content(self) -> str:
        options = "" if "    options:\n" in self.block else "    options:\n"
        return f"---\ntitle: {self.name}\n---\n{self.block}{options}      heading_level: 1\n"

    @property
    def summary(self) -> str:
        found = _package()[self.path.removeprefix("remat.")] if self.path != "remat" else _package()
        text = " ".join(found.docstring.value.split("\n\n")[0].split()) if found.docstring else ""
        return f"- [`{self.name}`]({self.page}): {text}\n"


@cache
def _package() -> Any:
    return griffe.load("remat", search_paths=[str(ROOT)], resolve_aliases=True)


def _entry(match: re.Match[str]) -> Entry:
    path, options = match["path"], match["options"]
    heading = _HEADING.search(options)
    short = path.rpartition(".")[2] if "show_root_full_path: false" in options else path
    return Entry(path, heading[1] if heading else short, f"::: {path}\n{options}")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages, and list them in the navigation below the page that has their line."""
    section = next(part["API"] for part in config["nav"] if "API" in part)
    for place, group in enumerate(section):
        if isinstance(group, str):
            continue
        ((title, source),) = group.items()
        entries = [_entry(match) for match in _ENTRY.finditer(_text(source))]
        for entry in entries:
            files.append(File.generated(config, f"api/{entry.page}", content=entry.content))
        section[place] = {title: [{"Overview": source}, *({e.name: f"api/{e.page}"} for e in entries)]}
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links in place of the entries, on the pages that are written by hand."""
    if page.file.generated_by is not None:
        return markdown
    return _ENTRY.sub(lambda match: _entry(match).summary, markdown + "\n")


def _text(source: str) -> str:
    return (ROOT / "docs" / source).read_text(encoding="utf-8") + "\n"
