"""What the modes that watch regions share: which are active on a thread, and silence for our own ops."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from remat.transforms.compat import DispatchMode

if TYPE_CHECKING:
    from remat.transforms.tape import Trace


class _Active(threading.local):
    """What is going on in this thread. (A bare threading.local is slow to say that it lacks something.)"""

    stack: Any = ()
    quiet = False
    unasked = False


active = _Active()


class Mode(DispatchMode):
    """Shared by recording and replaying: a stack of those active, and silence for the engine's own ops."""

    # Under autocast torch caches casts of leaves, across regions: whether such a cast happens in a forward
    # and in its recomputation is chance. They are left out of the sequence. The ids of arguments that torch
    # does not cache.
    uncached: set[int] | None = None

    def _cached_cast(self, func: Any, args: Any) -> bool:
        if self.uncached is None or func is not torch.ops.aten._to_copy.default:
            return False
        return args[0].is_leaf and args[0].requires_grad and id(args[0]) not in self.uncached

    trace: Trace
    records = False  # whether it watches a forward

    def __enter__(self) -> Any:
        stack = active.__dict__.setdefault("stack", [])
        self.trace.parent = self.trace.parent or self._link(stack)
        stack.append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> Any:
        active.stack.pop()
        return super().__exit__(*exc)

    @staticmethod
    def _link(stack: list[Any]) -> tuple[Trace, int] | None:
        return (stack[-1].trace, stack[-1].position) if stack else None

    @property
    def position(self) -> int:
        raise NotImplementedError


def enclosing() -> Mode | None:
    """The innermost recording or replaying in progress on this thread."""
    stack = active.stack
    return stack[-1] if stack else None


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Tell the enclosing recording, if any, that what runs now is a region of its own."""
    mode = enclosing()
    if mode is None or not mode.records:
        yield
        return
    start = mode.position
    yield
    mode.trace.inner.append((start, mode.position))


def recordings() -> list[Any]:
    """The recordings in progress on this thread, outermost first."""
    return [mode for mode in active.stack if mode.records]


def around(mode: Mode) -> Mode | None:
    """What records or replays around `mode`."""
    stack = active.stack
    at = next((i for i, other in enumerate(stack) if other is mode), 0)
    return stack[at - 1] if at else None


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
