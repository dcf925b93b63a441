"""From a joint graph and a cost model to the planning problem."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from remat.plan.graph.costs import CostModel
from remat.plan.graph.flops import flops_of, is_heavy
from remat.plan.graph.traffic import is_view
from remat.plan.joint import Joint, Op
from remat.plan.solve import INF, Problem
from remat.transforms import BoundedCache, RematError, draws, traits


@dataclass(frozen=True)
class Graph:
    """The region's joint graph as a planning problem.

    Op `k` of the problem is op `k` of the forward. Value `k` is everything that it makes, since an engine
    that saves an op saves all its results. Each input of the region follows as an op that cannot run, with
    its value. Four rules of the engine are written into the numbers:

    - Views cannot be saved: their base is, and they are taken again at no cost.
    - What an op writes in place cannot be saved either: the value before the first write can, and the writes
      are repeated on a copy of it. What else such an op makes can be, but no memory that nobody has filled.
    - A decision must not run again (see `transforms/ops.py`).
    - A cast that autocast may have in its cache is nobody's to keep either.
    - A draw that runs again needs all draws before it, so that the generator is where it was. The draws are
      chained by a value of their own that cannot be saved.

    Attributes:
        joint: the joint graph.
        alone: whether it was traced outside of torch.func's levels.
        elsewhere: the storages of results that count where they are held, outside of the region.
        returned: those of them that nobody else holds any more when the region's backward begins.
        every: the graph of the same call with all its results, of which some are gone before this backward.
        solved: what was solved on it: plans by their policies; and what calls of its kind return.
    """

    joint: Joint
    alone: bool = True
    elsewhere: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()
    every: Graph | None = None
    solved: BoundedCache[Hashable, Any] = field(
        default_factory=lambda: BoundedCache(64), repr=False, compare=False
    )

    def deciding_again(self) -> Graph:
        """The same where decisions may run again."""
        return self.solved.made(
            "deciding again",
            lambda: Graph(
                replace(self.joint, decides=False),
                self.alone,
                self.elsewhere,
                self.returned,
                self.every and self.every.deciding_again(),
            ),
        )

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The forward's ops."""
        return self.joint.forward

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Their names: the identity that a plan is checked against."""
        return tuple(op.name for op in self.ops)

    @cached_property
    def signature(self) -> tuple[Hashable, ...]:
        """What graphs must have in common for plans and prices of one to be those of the other."""
        joint = self.joint
        ops = tuple(
            (op.name, repr((op.args, op.kwargs)), op.reads, op.outputs, op.forward) for op in joint.ops
        )
        ends = joint.saved, joint.pinned, joint.shapes, joint.gradients, joint.differentiated, joint.decides
        return ops, joint.values, joint.storages, *ends

    def check_differentiated(self, name: str) -> None:
        """Raise where there is no backward to keep anything for.

        Raises:
            RematError: says what to write.
        """
        if not self.joint.gradients:
            raise RematError(
                f"There is nothing to plan: no gradient flows through {name}. None of its arguments, "
                "parameters and captured tensors requires grad, or no result depends on one that does (a "
                "function that makes a module returns none: plan what it made). Write x.requires_grad_() for "
                "what is differentiated, and plan outside of torch.inference_mode()."
            )

    @cached_property
    def cast(self) -> int:
        """Bytes of casts that autocast may have in its cache."""
        made = {self.joint.values[o].storage for op in self.ops if op.optional for o in op.outputs}
        return sum(self.joint.storages[s] for s in made)

    @cached_property
    def flops(self) -> tuple[float, ...]:
        """FLOPs of each forward op."""
        return tuple(flops_of(self.joint, op) for op in self.ops)

    @cached_property
    def step_flops(self) -> float:
        """FLOPs of forward and backward together, without recomputation."""
        return sum(self.flops) + sum(flops_of(self.joint, op) for op in self.joint.backward)

    @cached_property
    def draws(self) -> tuple[int, ...]:
        """Positions of the ops that draw random numbers."""
        return tuple(
            k
            for k, op in enumerate(self.ops)
            if traits(op.target).random and draws(op.target, op.args, op.kwargs)
        )

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The values from outside: arguments, parameters, captured tensors."""
        values = self.joint.values
        return tuple(v for v, value in enumerate(values) if value.producer < 0 and value.origin != "tangent")

    def _place(self, number: int) -> int | None:
        """The problem's value that holds a value of the joint graph."""
        producer = self.joint.values[number].producer
        return producer if producer >= 0 else self._input_place.get(number)

    @cached_property
    def _input_place(self) -> dict[int, int]:
        return {v: len(self.ops) + k for k, v in enumerate(self.inputs)}

    def _size(self, position: int) -> float:
        op, joint = self.ops[position], self.joint
        fresh = {s for o in op.outputs if joint.owner[s := joint.values[o].storage] == position}
        unfilled = op.optional or traits(op.target).uninitialized
        if unfilled or is_view(joint, op) or (op.mutates and not fresh):
            return INF
        return float(sum(joint.storages[s] for s in fresh - self.free))

    @cached_property
    def free(self) -> frozenset[int]:
        """Those of `elsewhere` that cost nothing to keep: what is written over is kept as a copy."""
        return self.elsewhere.difference(self.joint.values[v].storage for op in self.ops for v in op.mutates)

    def _input_size(self, number: int) -> float:
        value = self.joint.values[number]
        return float(value.bytes) if value.origin == "argument" else 0.0

    @cached_property
    def kept_by_default(self) -> int:
        """Bytes that eager autograd keeps without any remat: whole storages, parameters free."""
        joint = self.joint
        storages: dict[int, int] = {}
        for storage in joint.held_by_nodes:
            first = joint.values[joint.family[storage][0]]
            if storage in self.elsewhere:
                continue
            if first.producer >= 0:
                storages[storage] = joint.storages[storage]
            elif first.origin == "argument":
                storages[storage] = sum(
                    joint.values[v].bytes for v in joint.family[storage] if joint.values[v].producer < 0
                )
        return sum(storages.values())

    @cached_property
    def _wanted(self) -> tuple[int, ...]:
        """What a backward needs the numbers of."""
        return tuple([v for v in self.joint.saved if v not in self.joint.shapes])

    @cached_property
    def lent(self) -> frozenset[int]:
        """Inputs that the region would need if it kept nothing, and that others may let go of: all but leaves
        with gradients, which autograd holds. As the problem numbers them."""
        joint, found = self.joint, set[int]()
        stack = list(self._wanted)
        while stack:
            if (number := stack.pop()) not in found:
                found.add(number)
                maker = joint.values[number].producer
                stack += joint.ops[maker].reads if maker >= 0 else ()
        held = {"leaf": found, "parameter": {*joint.differentiated}}
        lent = (v for v in found & self._input_place.keys() if v not in held.get(joint.values[v].origin, ()))
        return frozenset(self._input_place[v] for v in lent)

    def problem(self, model: CostModel, *, keep_heavy: bool = False) -> Problem:
        """The planning problem under a cost model.

        With `keep_heavy`, matmuls, convolutions and attention must not run again.
        """
        cost = [self._price(model, op, keep_heavy) for op in self.ops] + [INF] * len(self.inputs)
        for decision in self.joint.decisions:
            cost[decision] = INF
        size = [self._size(k) for k in range(len(self.ops))] + [self._input_size(v) for v in self.inputs]
        # What `empty_like` is given may be gone when it runs again: its shape is known.
        reads = [() if traits(op.target).shape_only else self.places(op.reads) for op in self.ops]
        reads += [()] * len(self.inputs)
        producer = list(range(len(cost)))
        for earlier, later in zip(self.draws, self.draws[1:], strict=False):
            reads[later] += (len(producer),)
            producer.append(earlier)
            size.append(INF)
        need = frozenset(self.places(self._wanted))
        return Problem(tuple(cost), tuple(reads), tuple(producer), tuple(size), need=need)

    def places(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """The problem's values that hold these values of the joint graph."""
        return tuple(sorted({place for v in numbers if (place := self._place(v)) is not None}))

    def memory_of(self, places: Iterable[int]) -> set[int]:
        """The storages that these values of the problem lie in."""
        count = len(self.ops)
        numbers = (self.ops[p].outputs if p < count else (self.inputs[p - count],) for p in places)
        return {self.joint.values[v].storage for some in numbers for v in some}

    def _price(self, model: CostModel, op: Op, keep_heavy: bool) -> float:
        facts = traits(op.target)
        if facts.outside and not facts.functional:
            return INF
        if is_view(self.joint, op):
            return 0.0
        return INF if keep_heavy and is_heavy(self.joint, op) else model.price(self.joint, op)
