"""What the modes that watch regions share: which are active on a thread, and silence for our own ops."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from remat.transforms.compat.modes import DispatchMode

if TYPE_CHECKING:
    from remat.transforms.tape.tape import Tape


class _Active(threading.local):
    """What is going on in this thread. (A bare threading.local is slow to say that it lacks something.)"""

    stack: Any = ()
    quiet = False
    unasked = False


active = _Active()


class Mode(DispatchMode):
    """Shared by recording and replaying: a stack of those active, and silence for the engine's own ops."""

    tape: Tape
    records = False  # whether it watches a forward
    parent: Mode | None = None  # what records or replays around it

    def __enter__(self) -> Any:
        stack = active.__dict__.setdefault("stack", [])
        self.parent = stack[-1] if stack else None
        stack.append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> Any:
        active.stack.pop()
        return super().__exit__(*exc)

    @property
    def position(self) -> int:
        """How many ops it has seen."""
        raise NotImplementedError


def enclosing() -> Mode | None:
    """The innermost recording or replaying in progress on this thread."""
    stack = active.stack
    return stack[-1] if stack else None


def selective_around() -> bool:
    """Whether a region around may keep values, which one inside must then not recompute."""
    return any(getattr(mode, "selective", True) for mode in active.stack)


def recordings() -> list[Any]:
    """The recordings in progress on this thread, outermost first."""
    return [mode for mode in active.stack if mode.records]


def is_quiet() -> bool:
    """Whether an op of the engine's own runs."""
    return active.quiet


def quiet(function: Callable[..., Any], *args: Any) -> Any:
    """Run an op of the engine's own, which no recording counts."""
    before = active.quiet
    active.quiet = True
    try:
        return function(*args)
    finally:
        active.quiet = before


def unasked(function: Callable[..., Any], *args: Any) -> Any:
    """Run an op of the engine's own, which recordings count, and no selector is asked about."""
    before = active.unasked
    active.unasked = True
    try:
        return function(*args)
    finally:
        active.unasked = before
