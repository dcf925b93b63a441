"""The one exception class of the library, and what several of its messages say."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch


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


class WrongType(RematError, TypeError):
    """An argument of a type that cannot work."""


class WrongValue(RematError, ValueError):
    """An argument of the right type, with a value that cannot work."""


# In a checkout transforms/ is reached through a link, so that it has two spellings.
_HERE = os.path.dirname(os.path.abspath(__file__))
_HIDDEN = (os.path.dirname(torch.__file__), os.path.dirname(_HERE), os.path.realpath(_HERE))
# What `remat sweep` trains: its ops are shown as those of a user's model are.
_MODELS = os.path.join(os.path.dirname(_HERE), "cli", "models", "")
_MODULES = os.path.join(os.path.dirname(torch.__file__), "nn", "modules", "")


def user_place() -> str | None:
    """`file:line (function)` of the innermost frame that belongs to neither torch nor this library.

    Where there is none, as for a model of torch's own modules on the command line: that of torch's module.
    """
    frame, within = sys._getframe(1), None
    while frame is not None:
        if is_user_frame(frame):
            return _place(frame)
        if within is None and frame.f_code.co_filename.startswith(_MODULES):
            within = frame
        frame = frame.f_back
    return None if within is None else _place(within)


def _place(frame: Any) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def user_line() -> str:
    """`user_place` for messages."""
    return user_place() or "an unknown line"


def is_user_frame(frame: Any) -> bool:
    """Whether a stack frame runs code of neither torch nor this library."""
    name = frame.f_code.co_filename
    return name.startswith(_MODELS) or not name.startswith(_HIDDEN + ("<",))


def written(reader: str, tensor: Any, path: str | None = None, place: str = "region") -> str:
    """The message for a tensor written between forward and backward; `path` is what the user calls it."""
    what = f"a {tuple(tensor.shape)} {tensor.dtype} tensor"
    what = f"`{path}`, {what}" if path else what
    return (
        f"{reader} reads {what} that was written in place between its forward and its backward, so "
        "the recomputation would see another value. Write out of place (`x = x + 1`), pass a `.clone()` "
        f"into the {place}, or run the backward first."
    )


def overwritten(region: str, tensor: Any) -> str:
    """The message for a recomputed value that a backward has written to before another one reads it."""
    return (
        f"a backward inside region {region!r} has written in place to a {tuple(tensor.shape)} {tensor.dtype} "
        "tensor from `ctx.saved_tensors`, which another backward reads too. Write to a `.clone()` of it."
    )


def not_repeated(region: str, what: str) -> str:
    """The message for a recomputation that runs otherwise than its forward did."""
    return (
        f"the recomputation of region {region!r} does not repeat its forward: {what}, at {user_line()}. "
        "(a) The function reads something that changed in between (a global, an attribute, a counter); (b) "
        "it is random in a way torch does not restore (Python's or NumPy's generator); (c) an argument was "
        "changed. Make the function depend on its arguments only."
    )


def carried(name: str) -> str:
    """What is said where a derivative is written to what a region did not make, below its levels."""
    return (
        f"region {name!r} writes what carries a derivative into an argument or captured tensor. Under nested "
        "derivatives of torch.func the derivative would be lost there. Write what is detached "
        "(`.detach()`), or return the new value."
    )


def changing(name: str) -> str:
    """The message for a function that reads another captured tensor whenever it starts over."""
    return (
        f"region {name!r} reads tensors that carry derivatives and that change from run to run, so they "
        "cannot be made operands. Pass them as arguments. (Such are those that torch.func.linearize puts "
        "into its graph. Torch itself loses their derivatives, without remat too: write torch.func.jvp.)"
    )
