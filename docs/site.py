"""What mkdocs asks while it builds the site: the version, and links into the repository.

mike builds a version that is published, and says so in the environment. The menu of versions then stands
beside the name, and pages lead to the tag of the version. Other builds have the version in the name and lead
to the main branch.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
# A table with a column aligned to the right has numbers.
_FIGURES = re.compile(r'<table>(?=\s*<thead>(?:(?!</thead>).)*align="right)', re.DOTALL)
_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_UP = re.compile(r"\]\((\.\./[^)\s]+)\)")


def version() -> str:
    match = _VERSION.search((ROOT / "remat" / "__init__.py").read_text(encoding="utf-8"))
    assert match, "remat/__init__.py has no __version__"
    return match[1]


def published() -> bool:
    return "MIKE_DOCS_VERSION" in os.environ


def on_config(config: Any) -> Any:
    if not published():
        config["site_name"] = f"{config['site_name']} {version()}"
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Files beside docs/ are not on the site: `../examples/x.py` leads to the repository."""
    tree = f"v{version()}" if published() else "main"
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if not target.startswith("../"):
            return match[0]
        return f"]({config['repo_url']}/blob/{tree}/{target.removeprefix('../')})"

    return _UP.sub(link, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Tables of figures are not searched: every page loads the index, and nobody looks for a number in it.

    A bar in a cell is escaped in Markdown. In code Python-Markdown shows the backslash, unlike GitHub.
    """
    html = _CELL.sub(lambda cell: cell[0].replace(r"\|", "|"), html)
    return _FIGURES.sub("<table data-search-exclude>", html)
