"""What the build does beyond pyproject.toml.

README's links are relative, so that they work in every checkout and fork. PyPI shows the page alone, so there
they lead to the repository named in `[project.urls]`, at the tag of the version.

The engine's folder `transforms/` is reached by a symbolic link, `remat/transforms`. A checkout without
symbolic links (Windows) has a text file in its place. So the build excludes the link and includes the folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#|mailto:)([^)\s]+)\)")
_PICTURE = re.compile(r'\b(src|srcset)="(?!https?:)([^"]+)"')
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        match = _VERSION.search((root / "remat" / "__init__.py").read_text(encoding="utf-8"))
        assert match, "remat/__init__.py has no __version__"
        text = (root / "README.md").read_text(encoding="utf-8")
        text = absolute(text, metadata["urls"]["Repository"], f"v{match[1]}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # A source distribution has the folder at its installed place already.
        places = [Path(self.root, "transforms"), Path(self.root, "remat", "transforms")]
        if version != "editable":
            folder = next(place for place in places if place.is_dir())
            build_data["force_include"][str(folder)] = "remat/transforms"


def absolute(text: str, repository: str, tag: str) -> str:
    """`text` with links into the repository instead of relative ones; pictures as files, not as pages."""

    def target(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}{match[2]}({repository}/{kind}/{tag}/{match[3]})"

    return _PICTURE.sub(rf'\1="{repository}/raw/{tag}/\2"', _LINK.sub(target, text))
