"""From a joint graph and a cost model to the planning problem."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from remat.plan.costs import CostModel, flops_of, is_heavy, is_view
from remat.plan.problem import INF, Problem
from remat.transforms._joint import Joint, Op


def is_random(op: Op) -> bool:
    """Whether an op draws numbers: attention without dropout carries the tag, yet draws none."""
    if torch.Tag.nondeterministic_seeded not in getattr(op.target, "tags", ()):
        return False
    return _argument(op, "dropout_p", default=None) not in (0, 0.0)


def _argument(op: Op, name: str, default: Any) -> Any:
    if name in op.kwargs:
        return op.kwargs[name]
    for position, argument in enumerate(op.target._schema.arguments):
        if argument.name == name:
            return op.args[position] if position < len(op.args) else argument.default_value
    return default


def runs_once(joint: Joint, op: Op) -> bool:
    """Random ops, collectives, and ops that write what the region does not own must not be run again."""
    if is_random(op) or op.name.startswith(("c10d.", "_c10d_functional.", "c10d_functional.")):
        return True
    return any(joint.owner[joint.values[v].storage] < 0 for v in op.mutates)


@dataclass(frozen=True)
class Graph:
    """The region's joint graph as a planning problem.

    Ops `0 .. n-1` of the problem are the forward's, in order; each input of the region follows as an op that
    cannot run. Values are numbered as in `joint`.
    """

    joint: Joint

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The forward's ops."""
        return self.joint.forward

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Their names: the identity that a plan is checked against."""
        return tuple(op.name for op in self.ops)

    @cached_property
    def flops(self) -> tuple[float, ...]:
        """FLOPs of each forward op."""
        return tuple(flops_of(self.joint, op) for op in self.ops)

    @cached_property
    def step_flops(self) -> float:
        """FLOPs of forward and backward together, without recomputation."""
        return sum(self.flops) + sum(flops_of(self.joint, op) for op in self.joint.backward)

    @cached_property
    def sizes(self) -> tuple[float, ...]:
        """Bytes that keeping each value adds; `inf` where something else has to be kept in its place."""
        return tuple(self._size(v) for v in range(len(self.joint.values)))

    def _size(self, number: int) -> float:
        joint = self.joint
        value = joint.values[number]
        family = joint.family[value.storage]
        if value.producer < 0:
            return INF if value.origin == "tangent" else 0.0 if value.origin == "parameter" else float(value.bytes)
        last = joint.last_write.get(value.storage)
        if joint.owner[value.storage] < 0:
            # What was written into somebody else's tensor is still there afterwards, at no cost to us.
            return 0.0 if number == last else INF
        if number != (family[0] if last is None else last):
            return INF
        # Written piecewise, through views of other shapes: no single value of it is the whole storage.
        whole = all(joint.values[v].shape == value.shape for v in family) if last is not None else True
        return float(joint.storages[value.storage]) if whole else INF

    @cached_property
    def kept_by_default(self) -> int:
        """Bytes that eager autograd keeps without any remat: whole storages, parameters free."""
        joint = self.joint
        storages: dict[int, int] = {}
        for number in joint.saved:
            storage = joint.values[number].storage
            first = joint.values[joint.family[storage][0]]
            if first.producer >= 0:
                storages[storage] = joint.storages[storage]
            elif first.origin == "argument":
                storages[storage] = sum(
                    joint.values[v].bytes for v in joint.family[storage] if joint.values[v].producer < 0
                )
        return sum(storages.values())

    def problem(self, model: CostModel, *, keep_heavy: bool = False) -> Problem:
        """The planning problem under a cost model.

        With `keep_heavy`, matmuls, convolutions and attention must not run again.
        """
        joint = self.joint
        inputs = [v for v, value in enumerate(joint.values) if value.producer < 0]
        place = {v: len(self.ops) + k for k, v in enumerate(inputs)}
        cost = [self._price(model, op, keep_heavy) for op in self.ops] + [INF] * len(inputs)
        reads = [op.reads for op in self.ops] + [()] * len(inputs)
        # Values that the backward makes stand at the end, and are nobody's business here.
        forward = [v for v, value in enumerate(joint.values) if value.producer < len(self.ops)]
        count = (max(forward) + 1) if forward else 0
        producer = tuple(
            place[v] if v in place else min(joint.values[v].producer, len(cost) - 1) for v in range(count)
        )
        return Problem(
            tuple(cost), tuple(reads), producer, self.sizes[:count], need=frozenset(v for v in joint.saved if v < count)
        )

    def _price(self, model: CostModel, op: Op, keep_heavy: bool) -> float:
        if runs_once(self.joint, op) or (keep_heavy and is_heavy(self.joint, op)):
            return INF
        return 0.0 if is_view(self.joint, op) else model.price(self.joint, op)
