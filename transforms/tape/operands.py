"""What the ops of a function that runs again read, compared with its forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from remat.transforms.ops import geometry, memory_of, tensors_in


class Operands:
    """The places in memory of the values of a second run, by their numbers on the forward's tape.

    Places and not tensor objects: levels of `torch.func` wrap a value anew. What is unknown is not compared:
    aliases that autograd makes, memory from outside that the function writes to (each run has a copy), and
    memory that Python has looked at or replaced.

    Args:
        arguments: those of this run, in the order of the forward's.
        outside: the other tensors that the forward has read from outside, by their places on the tape.
        written: the numbers of the memories from outside that the function writes to.
        same: whether two tensors have the same numbers, as a constant has that each run makes anew.
    """

    def __init__(
        self,
        tape: Any,
        arguments: Sequence[torch.Tensor],
        outside: Mapping[int, torch.Tensor],
        written: Set[int],
        same: Callable[[torch.Tensor, torch.Tensor], bool],
    ) -> None:
        self.tape, self.outside, self.same = tape, outside, same
        self._unknown = written | tape.exposed
        self._memories: dict[int, weakref.ref[Any]] = {}  # by their roots
        self._places: dict[int, tuple[weakref.ref[Any], Any]] = {}
        for at, tensor in enumerate(arguments):
            self._add(-1 - at, tensor)

    def made(self, node: Any, out: Any) -> None:
        """Note where the results of an op lie."""
        for number, tensor in enumerate(tensors_in(out), node.first):
            self._add(number, tensor)

    def unlike(self, read: Iterable[tuple[int, torch.Tensor]], absent: Callable[[], Any]) -> str | None:
        """What an op reads, with the numbers that it read in the forward, that is not that; None if it is.

        `absent` knows what caches hold: `cache.setdefault(key, make())` makes it anew and reads the first."""
        for number, tensor in read:
            memory, place = memory_of(tensor), self._places.get(number)
            if memory is None or (self._unknown and self.tape.root_of(number) in self._unknown):
                continue
            if place is not None:
                there = place[0]() is memory and place[1] == geometry(tensor)
                if not there and not absent().is_held(number, tensor):
                    return f"another tensor ({list(tensor.shape)}) than in the forward"
                continue
            was = self.outside.get(-1 - number) if number < 0 else None
            if was is None or (memory_of(was) is memory and geometry(was) == geometry(tensor)):
                continue
            if not self.same(was, tensor):
                what = f"a tensor ({list(tensor.shape)}) that was put in the place of the forward's"
                return f"{what}. Pass it as an argument, or write by copy_"
        return None

    def _add(self, number: int, tensor: torch.Tensor) -> None:
        memory = memory_of(tensor)
        if memory is None:
            return
        # A kept view lies apart from its base. A region inside may make the same view of the base by no op.
        first = self._memories.setdefault(self.tape.root_of(number), weakref.ref(memory))
        if first() is memory:
            self._places[number] = first, geometry(tensor)
