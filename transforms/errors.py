"""The one exception class of the library."""

from __future__ import annotations


class RematError(RuntimeError):
    """Raised when a region cannot be rematerialized correctly.

    The message names the region, the op and the user's line where they are known, and says what to
    write instead.

    Example:
        >>> import torch
        >>> from remat import RematError, remat
        >>> try:
        ...     remat(lambda x: x.mul_(2))(torch.ones(2, requires_grad=True) * 1)
        ... except RematError as error:
        ...     print("writes" in str(error))
        True
    """


RematError.__module__ = "remat"
