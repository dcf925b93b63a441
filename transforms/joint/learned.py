"""The forward half of a joint graph from the tape of a call that has run: no code of the user runs again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from remat.transforms.joint.ops import Joint, Op, Other, Ref, Value
from remat.transforms.ops import metas, traits
from remat.transforms.pytree import map_leaves
from remat.transforms.tape import Node, Tape, refs_in
from remat.transforms.tape import Ref as Number

_CONSTANT = (int, float, complex, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def learned(tape: Tape, held: tuple[bool, ...] = ()) -> Joint:
    """What the ops on `tape` were, for a planner; `held`: which arguments somebody else holds.

    There is no backward in it: what autograd saved is on the tape.
    """
    return _Reading(tape, held).joint()


class _Reading:
    """One reading of a tape. What it numbers -1, -2, ... comes first here, then the results of ops."""

    def __init__(self, tape: Tape, held: tuple[bool, ...]) -> None:
        self.tape = tape
        self.values: list[Value] = []
        self.storages: list[int] = []
        self.place: dict[int, int] = {}  # the value for each number on the tape
        self.memory: dict[int, int] = {}  # the storage for each root
        # What an op that writes makes of memories: values for those who read them later.
        self.written: dict[int, list[int]] = {}
        for at, outside in enumerate(tape.outside):
            mine = at < tape.arguments and not (at < len(held) and held[at])
            origin, known = "argument" if mine else "parameter", self.memory.get(outside.root)
            self.place[-1 - at] = self._add(outside.meta, -1, origin, known)
            self.memory[outside.root] = self.values[-1].storage

    def joint(self) -> Joint:
        ops = [self._op(at, node) for at, node in enumerate(self.tape.nodes)]
        saved: dict[int, None] = {}
        for number, position in self.tape.packed:
            writes = [v for at in self.tape.sources(number, position) for v in self.written.get(at, ())]
            saved |= dict.fromkeys([self.place[number], *writes])
        return Joint(tuple(ops), tuple(self.values), tuple(self.storages), tuple(saved), ())

    def _add(self, meta: Any, producer: int, origin: str, storage: int | None = None) -> int:
        """A new value, in this storage or in one of its own."""
        shape, stride, dtype, device = meta
        if storage is None:
            storage = len(self.storages)
            self.storages.append(_extent(shape, stride) * dtype.itemsize)
        self.values.append(Value(tuple(shape), dtype, device, tuple(stride or ()), storage, producer, origin))
        return len(self.values) - 1

    def _op(self, at: int, node: Node) -> Op:
        tape, values = self.tape, self.values
        template = node.args, node.kwargs
        numbers = refs_in(template)
        reads = {self.place[number] for number in numbers}
        reads |= {value for dep in node.deps for value in self.written.get(dep, ())}
        storage = None
        if node.root != at:
            # Of an op with several results, the memory of the one that is looked at.
            bases = (values[self.place[n]].storage for n in numbers if tape.root_of(n) == node.root)
            storage = next(bases, self.memory.get(node.root))
        overwritten = [self.place[n] for n in numbers if tape.root_of(n) in node.written]
        outputs = []
        for count, meta in enumerate(metas(node.outs)):
            outputs.append(self._add(meta, at, "op", storage))
            self.place[node.first + count] = outputs[-1]
            self.memory.setdefault(node.root, values[-1].storage)
        for old in overwritten:
            if not any(values[o].storage == values[old].storage for o in outputs):
                outputs.append(len(values))
                values.append(replace(values[old], producer=at, origin="op"))
        if node.written:
            self.written[at] = outputs
        args, kwargs = map_leaves(self._noted, template)
        made = node.op, args, kwargs, tuple(sorted(reads)), tuple(outputs), tuple(overwritten), True, ""
        return Op(*made, optional=node.optional and not traits(node.op).view)

    def _noted(self, leaf: Any) -> Any:
        if type(leaf) is Number:
            return Ref(self.place[leaf])
        return leaf if leaf is None or isinstance(leaf, _CONSTANT) else Other(type(leaf).__qualname__)


def _extent(shape: Any, stride: Any) -> int:
    """How many elements a memory has that a tensor fills."""
    if 0 in shape:
        return 0
    if stride is None:
        return torch.Size(shape).numel()
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
