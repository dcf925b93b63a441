"""What autograd saves in a region's forward, held as it is where that is the smaller thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from remat.transforms.compat import unseen
from remat.transforms.context import node_of
from remat.transforms.ops import memory_of


class Residuals:
    """The values that autograd saves, held while they are smaller than what they would be recomputed from.

    A value goes with its handle, so that what only dead code has saved is neither held nor counted.

    Args:
        inputs: the region's arguments.
        recorder: what counts the bytes that a policy keeps; None holds the values in any case.
    """

    __slots__ = ("_limit", "_recorder", "_sizes", "bytes", "tensors")

    def __init__(self, inputs: Sequence[torch.Tensor], recorder: Any) -> None:
        self.tensors: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()
        self._sizes: set[int] = set()
        self._recorder, self._limit, self.bytes = recorder, bytes_of(inputs), 0

    def add(self, handle: Any, tensor: torch.Tensor) -> bool:
        """Hold one more value; whether they are still small enough."""
        # (With a history it would hold the node that holds the handle: dead code would be none.)
        if node_of(tensor) is not None:
            with unseen(tensor):
                tensor = tensor.detach()
        self.tensors[handle] = tensor
        if self._recorder is None:
            return True
        key, size = _block(tensor)
        if key not in self._sizes:
            self._sizes.add(key)
            self.bytes += size
        most = self._limit + self._recorder.kept_bytes
        if self.bytes <= most or self.count() <= most:
            return True
        # What it captures of other values goes, too, as an argument does. (Weights stay in any case.)
        others = self._recorder.outside[self._recorder.tape.arguments :]
        most += bytes_of([t for t in others if node_of(t) is not None])
        return self.bytes <= most

    def leave(self, places: frozenset[int]) -> None:
        """Do not hold these values."""
        for handle in [handle for handle in self.tensors if handle.at in places] if places else ():
            del self.tensors[handle]

    def count(self) -> int:
        """Bytes of the values that are still there."""
        blocks = dict(map(_block, list(self.tensors.values())))
        self._sizes, self.bytes = set(blocks), sum(blocks.values())
        return self.bytes

    def finish(self) -> None:
        """Somebody else holds the values now."""
        self.tensors, self._recorder = WeakKeyDictionary(), None


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum(dict(map(_block, tensors)).values())


def _block(tensor: torch.Tensor) -> tuple[int, int]:
    memory = memory_of(tensor)
    if memory is None:
        return id(tensor), tensor.numel() * tensor.element_size()
    return id(memory), memory.nbytes()
