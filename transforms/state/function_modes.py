"""The user's torch-function modes, where the engine runs the user's code.

The engine's own work asks none of them. And the engine runs a function elsewhere than where it was called:
below the levels of torch.func, or at a level of its own. That shows at an `autograd.Function`. At a level
torch asks a mode about it as a whole, and runs it without modes; in plain autograd it asks nothing, and the
modes see what the Function calls. Here it goes as it would where the user's code was called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from remat.transforms.compat import (
    DeviceContext,
    around_function_apply,
    ask_about_function,
    depth,
    function_mode_at,
    function_modes,
    function_modes_asked,
    function_stack,
    in_transform,
)
from remat.transforms.context import active, scoped


def user_modes() -> tuple[Any, ...]:
    """The user's torch-function modes that are on, the outermost first, and in the place of a default device
    the device; where the engine works, those that it has put aside. Those of torch and of regions are not the
    user's."""
    if active.users is not None:
        return active.users
    return _on()


def _on() -> tuple[Any, ...]:
    if not function_modes():
        return ()
    found = filter(_is_users, _stack())
    return tuple([mode.device if isinstance(mode, DeviceContext) else mode for mode in found])


@contextlib.contextmanager
def just_these_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Within, these of the user's torch-function modes are on and no others; those of torch and of regions
    stay, around them: what the user's are given is what the user's code has given."""
    if tuple(modes) == _on():
        yield
        return
    others = [mode for mode in _stack() if not _is_users(mode)]
    with function_stack([*others, *map(_entered, modes)]):
        yield


@contextlib.contextmanager
def users_aside() -> Iterator[None]:
    """Within, the engine works: the user's torch-function modes are asked about what the user calls alone."""
    if not (modes := _on()):
        yield
        return
    with just_these_modes(()), scoped(users=modes, passing=modes):
        yield


@contextlib.contextmanager
def users_in_place(modes: Sequence[Any]) -> Iterator[None]:
    """Within, the engine runs what the user called under these modes, and goes backward after that."""
    with users_aside(), scoped(passing=user_modes(), users=tuple(modes)):
        yield


def under_levels() -> bool:
    """Whether the user's code at hand was called at a level of torch.func."""
    if active.seen is None:
        return in_transform()
    base, there = active.seen
    return there or depth() > base


class Called:
    """A function of the user's as the engine runs it: its torch functions ask those modes that they would ask
    where it was called, and about the same.

    Args:
        levels: what `under_levels` says there.
    """

    def __init__(self, function: Callable[..., Any], levels: bool) -> None:
        self.function, self.levels = function, levels

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modes = active.users
        if modes is None and active.seen is None and not (self.levels or in_transform()):
            return self.function(*args, **kwargs)
        with (
            just_these_modes(modes) if modes is not None else contextlib.nullcontext(),
            scoped(users=None, passing=None, seen=(depth(), self.levels), through=False),
        ):
            return self.function(*args, **kwargs)


def _below_levels(apply: Callable[[], Any], cls: Any, args: Any, kwargs: Any) -> Any:
    """Run a Function below all levels."""
    if active.seen is None:
        return apply()
    if active.through:  # from a level of the engine's
        modes = active.users or ()
        with just_these_modes(modes), scoped(users=None, passing=None, through=False):
            return apply()
    if not (function_modes_asked() and under_levels()):
        return apply()
    stack = _stack()
    if not (users := [mode for mode in stack if _is_users(mode)]):
        return apply()
    # Torch takes off the innermost one, asks it, and comes here again for the next. Regions' own see it all.
    with function_stack([*[mode for mode in stack if not _is_users(mode)], *users]):
        return ask_about_function(cls, args, kwargs)


def _at_level(call: Callable[[], Any]) -> Any:
    """Run a Function at a level."""
    if active.seen is None or not function_modes_asked() or under_levels() or not _on():
        return call()
    with users_aside(), scoped(through=True):
        return call()


around_function_apply(_below_levels, _at_level)


def _stack() -> list[Any]:
    """The torch-function modes that are on, the outermost first."""
    return [function_mode_at(i) for i in range(function_modes())]


def _is_users(mode: Any) -> bool:
    return isinstance(mode, DeviceContext) or not type(mode).__module__.startswith(("torch.", "remat."))


def _entered(mode: Any) -> Any:
    return DeviceContext(mode) if isinstance(mode, torch.device) else mode
