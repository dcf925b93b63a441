"""Ops of a forward that a second run of the function may leave out."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from remat.transforms.ops import traits, version_of
from remat.transforms.tape.tape import Node, Tape
from remat.transforms.tape.template import pairs

Living = tuple[int, "weakref.ref[torch.Tensor]", int]


class Absent:
    """What may be left out, and what stands for it.

    There are two kinds. Copies and views that no op reads: autograd makes such for writes in place, where an
    operand is differentiated, and the run for one of several levels may differentiate less. And ops that do
    not depend on arguments, if somebody holds what came of them: a cache that the forward has filled (masks,
    rotary tables, samples). Who reads such a value in the second run must read the very tensor. And who reads
    the very tensor of another value, in place of the one made anew, reads what the first call has put by.

    Args:
        tape: of the forward.
        living: the values that were still there at its end: number, tensor and version.
        results: the numbers of the region's results.
    """

    def __init__(self, tape: Tape, living: Iterable[Living], results: set[int]) -> None:
        self.tape = tape
        # Under FSDP what brings parameters runs without gradients, and is no part of the sequence.
        filled = set[int]() if tape.sharded else _from_no_argument(tape)
        # A value may be there as several tensors: a region inside takes an alias of what it reads.
        self.held: dict[int, list[tuple[weakref.ref[torch.Tensor], int]]] = {}
        for number, ref, version in living:
            if ref() is not None:
                self.held.setdefault(number, []).append((ref, version))
        self.filled = filled if any(tape.makers[number] in filled for number in self.held) else set[int]()
        self.ops = self.filled | _unread_copies(tape, results)

    def stands_in(self, node: Node, args: Any, kwargs: Any, left: set[int], *, shapes: bool = False) -> bool:
        """Whether what an op reads of the ops that were `left` out is what they had made.

        `shapes`: and the rest has the shapes of the forward.
        """
        makers = self.tape.makers
        for number, value in pairs((node.args, node.kwargs), (args, kwargs)):
            if number >= 0 and makers[number] in left:
                if not self.is_held(number, value):
                    return False
            elif shapes and value.shape != self.tape.meta_of(number)[0]:
                return False
        return True

    def is_held(self, number: int, value: torch.Tensor) -> bool:
        """Whether it is what the forward has made and somebody holds, unwritten."""
        held = self.held.get(number, ())
        return any(ref() is value and version_of(value) == version for ref, version in held)

    def number_of(self, value: torch.Tensor) -> int | None:
        """The number of such a value, None if it is none."""
        return next((number for number in self.held if self.is_held(number, value)), None)


def _from_no_argument(tape: Tape) -> set[int]:
    found: set[int] = set()
    for i, node in enumerate(tape.nodes):
        facts = traits(node.op)
        # (Every draw is given the state of its own, so that one may be left out.)
        drawn = facts.may_draw and not (facts.random and node.draws)
        unknown = drawn or facts.outside or facts.higher_order
        given = any(at < tape.arguments for at in node.external)
        if not unknown and not given and found.issuperset(node.deps) and found.issuperset(node.written):
            found.add(i)
    return found


def _unread_copies(tape: Tape, results: set[int]) -> set[int]:
    read, found = {tape.makers[n] for n in results if n >= 0}, set[int]()
    for i, node in reversed(list(enumerate(tape.nodes))):
        if i not in read and (node.op is torch.ops.aten.clone.default or traits(node.op).view):
            found.add(i)
        else:
            read.update(node.deps)
    return found
