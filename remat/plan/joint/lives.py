"""Until when memory is held by others than what autograd keeps: locals of Python, and nodes that run.

Every handle on a value is watched by a weak reference while a graph is recorded. What autograd keeps are
handles of its own, made by hooks on saved tensors, so that a handle that the forward has made says what
Python holds. In the backward the handles are those that a node has made, or has taken out of what was kept.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch


class _Handle(weakref.ref[Any]):
    """A tensor that is alive; `late` where the backward has made it, None where autograd keeps it."""

    __slots__ = ("key", "late", "number", "storage")

    key: int
    number: int
    storage: int
    late: bool | None


class Lives:
    """Counts the handles on each storage; `now` is the position of the op that was begun last."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self.now = -1
        self.backward = False
        self._numbers = numbers
        self._kept_by_autograd = False
        self._handles: dict[int, _Handle] = {}
        self._packed: dict[int, int] = {}
        self._count: tuple[dict[int, int], dict[int, int]] = {}, {}
        self._died: tuple[dict[int, int], dict[int, int]] = {}, {}

    def see(self, tensor: torch.Tensor, number: int, storage: int, late: bool) -> None:
        """A handle on a value and its storage."""
        key = id(tensor)
        if key in self._handles:
            return
        handle = _Handle(tensor, self._gone)
        handle.key, handle.number, handle.storage = key, number, storage
        handle.late = None if self._kept_by_autograd else late
        self._handles[key] = handle
        if handle.late is None:
            self._packed[number] = self._packed.get(number, 0) + 1
        else:
            count = self._count[late]
            count[storage] = count.get(storage, 0) + 1

    def _gone(self, handle: _Handle) -> None:
        if self._handles.get(handle.key) is not handle:
            return
        del self._handles[handle.key]
        # Another tensor may get this identity.
        self._numbers.pop(handle.key, None)
        if handle.late is not None:
            self._count[handle.late][handle.storage] -= 1
            self._died[handle.late][handle.storage] = self.now
        else:
            # What autograd keeps goes with the node that has read it, or with a branch that nobody uses.
            self._packed[handle.number] -= 1
            self._died[self.backward][handle.storage] = self.now

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Within, handles are autograd's."""
        self._kept_by_autograd = True
        try:
            yield
        finally:
            self._kept_by_autograd = False

    def packed(self, number: int) -> bool:
        """Whether a node that is alive keeps a value."""
        return self._packed.get(number, 0) > 0

    def ends(self, storages: int, *, late: bool, alive: int) -> tuple[int, ...]:
        """For each storage the last op while it was held, -1 if it never was, `alive` if it still is."""
        count, died = self._count[late], self._died[late]
        return tuple([alive if count.get(s) else died.get(s, -1) for s in range(storages)])

    def forget(self) -> None:
        """Let go of all handles."""
        self._handles.clear()
        self._packed.clear()
