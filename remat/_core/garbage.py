"""Python's search for garbage, while many objects are made that live."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Traces and compilers make many objects that live: to look for garbage among them takes up to a fifth of
    their time."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 200_000) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
