"""What mkdocs asks while it builds the site: the version, and links into the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_OUTSIDE = re.compile(r"\]\(\.\./([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """The version stands in the name of the site, at the top of every page."""
    match = _VERSION.search((ROOT / "remat" / "__init__.py").read_text(encoding="utf-8"))
    assert match, "remat/__init__.py has no __version__"
    config["site_name"] = f"{config['site_name']} {match[1]}"
    return config


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Files beside docs/ are not on the site: `../examples/x.py` leads to the repository."""
    return _OUTSIDE.sub(rf"]({config['repo_url']}/blob/main/\1)", markdown)
