"""How mkdocstrings reads docstrings of this library."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """`Example:` is a section of code, as the parser knows `Examples:`; its brackets are no links."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("Example:\n", "Examples:\n")
