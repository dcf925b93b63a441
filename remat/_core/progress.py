"""What a plan that takes long tells of itself: a line after a second, others later, one when it is made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar, Token

_logger = logging.getLogger("remat")
# Seconds until the first line, and between two.
_FIRST, _EVERY = 1.0, 5.0


class Telling:
    """Within, the plan of something is made: `did` tells how far it is, to the logger "remat"."""

    __slots__ = ("due", "name", "said", "start", "token")

    def __init__(self, name: Callable[[], str]) -> None:
        self.name, self.said = name, False
        self.token: Token[Telling | None] | None = None

    def __enter__(self) -> None:
        # What runs in every call of a region is as short as can be.
        if _telling.get() is None:
            self.start = time.monotonic()
            self.due = self.start + _FIRST
            self.token = _telling.set(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.token is not None:
            _telling.reset(self.token)
        if self.said and kind is None:
            text = "The plan of %s took %.1f s; calls that look like this one follow it."
            _logger.warning(text, self.name(), time.monotonic() - self.start)


_telling: ContextVar[Telling | None] = ContextVar("remat_plan_progress", default=None)


def did(what: str, count: int) -> None:
    """So many ops are traced, priced, or what it is; said where a line is due."""
    told = _telling.get()
    if told is not None and (now := time.monotonic()) >= told.due:
        told.due, told.said = now + _EVERY, True
        text = "Planning %s for its first call under a budget: %s ops %s after %.1f s."
        _logger.warning(text, told.name(), f"{count:,}", what, now - told.start)
