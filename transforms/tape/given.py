"""Which tensor an op reads in a second run of the function, held against the forward.

Ops and constants say nothing of a function that takes another of its captured weights, or another of its own
values: the ops are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from remat.transforms.context import quiet
from remat.transforms.ops import geometry, memory_of, storage, tensors_in, version_of
from remat.transforms.pytree import smooth
from remat.transforms.state import alike, prints_of
from remat.transforms.tape.absent import pairs
from remat.transforms.tape.recorder import Recorder
from remat.transforms.tape.tape import Node, Tape


class Given(NamedTuple):
    """A tensor from outside, held by whoever else holds it."""

    ref: weakref.ref[torch.Tensor]
    memory: weakref.ref[Any]  # which may outlive the tensor
    version: int
    storage: int
    snapshot: Any  # what its memory was before the region wrote to it, or None


def let_go(recorder: Recorder) -> list[Given]:
    """The tensors from outside; afterwards the recorder holds none of them."""
    snapshots, known = recorder.snapshots, recorder.tape.outside
    given = [
        Given(
            weakref.ref(t), weakref.ref(memory_of(t) or t), version_of(t), storage(t), snapshots.get(o.root)
        )
        for t, o in zip(recorder.outside, known, strict=True)
    ]
    recorder.outside = []
    return given


class Operands:
    """The places in memory of the values of a second run, by their numbers on the forward's tape.

    Places and not tensor objects: levels of `torch.func` wrap a value anew. A value whose place is not known,
    such as an alias that autograd makes, is not compared. Nor are values in memory from outside that the
    function writes to, for each run has a copy of its own, or whose memory Python has looked at or replaced.

    Args:
        tape: of the forward.
        arguments: those of this run, in the order of the forward's.
        outside: the other tensors that the forward has read from outside, by their places on the tape.
        written: the numbers of the memories from outside that the function writes to.
        casts: whether autocast is on.
    """

    def __init__(
        self,
        tape: Tape,
        arguments: Sequence[torch.Tensor],
        outside: Mapping[int, torch.Tensor],
        written: Set[int],
        casts: bool = False,
    ) -> None:
        self.tape, self.outside, self.casts = tape, outside, casts
        self._unknown = written | tape.exposed
        self._places: dict[int, tuple[weakref.ref[Any], Any]] = {}
        for at, tensor in enumerate(arguments):
            self._add(-1 - at, tensor)

    def made(self, node: Node, out: Any) -> None:
        """Note where the results of an op lie."""
        for number, tensor in enumerate(tensors_in(out), node.first):
            self._add(number, tensor)

    def unlike(self, node: Node, args: Any, kwargs: Any) -> str | None:
        """What an op reads that it did not read in the forward; None if there is no such tensor."""
        if node.shape_only:
            return None  # no number of it matters
        for number, tensor in pairs((node.args, node.kwargs), (args, kwargs)):
            memory, place = memory_of(tensor), self._places.get(number)
            if memory is None or (self._unknown and self.tape.root_of(number) in self._unknown):
                continue
            if place is not None:
                if place[0]() is not memory or place[1] != geometry(tensor):
                    return f"another tensor ({list(tensor.shape)}) than in the forward"
                continue
            was = self.outside.get(-1 - number) if number < 0 else None
            # A constant that is made anew in each run is another tensor with the same numbers.
            if was is not None and not (_same_place(was, tensor) or quiet(self._same_numbers, was, tensor)):
                return (
                    f"a tensor ({list(tensor.shape)}) that was put in the place of the forward's. Pass it as "
                    "an argument, or write by copy_"
                )
        return None

    def _add(self, number: int, tensor: torch.Tensor) -> None:
        memory = memory_of(tensor)
        if memory is not None:
            self._places[number] = weakref.ref(memory), geometry(tensor)

    def _same_numbers(self, tensor: torch.Tensor, other: torch.Tensor) -> bool:
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            return False
        if smooth(tensor):
            return alike(prints_of([tensor]), prints_of([other]), self.casts)
        return tensor.layout is not torch.strided or torch.equal(tensor, other)


def _same_place(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie at one place in one memory."""
    return storage(tensor) == storage(other) and tensor.storage_offset() == other.storage_offset()
