"""The one exception class of the library."""

from __future__ import annotations


class RematError(RuntimeError):
    """Raised when a region cannot be rematerialized correctly.

    The message names the region, the op and the user's line where they are known, and says what to
    write instead.
    """


RematError.__module__ = "remat"
