"""The one language of patterns for names of modules: `*` stands for anything, dots too."""

from __future__ import annotations

import fnmatch


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern means the module of this qualified name; the model itself, "", is meant by none.

    Example:
        >>> from remat._core import fits
        >>> fits("*.layers.*", "layers.0"), fits("layers.*", "model.layers.0")
        (True, False)
    """
    # With a dot in front "*.layers.*" fits the layers of a model that is not inside another.
    return bool(name) and (fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f".{name}", pattern))


def starred(name: str) -> str:
    """A name as a pattern: every number in it may be another one."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
