"""The planning problem as plain numbers: no torch, so that solvers can be tested against brute force.

An *op* may run again in the backward pass at a price, a *value* may be kept at a size in bytes. The backward
reads some values (`need`). Each is either kept or made again. An op can be run again only if every value it
reads is kept or made again:

    min   sum cost[o] r[o]
    s.t.  r[producer(v)] + s[v] >= 1           v in need
          r[o] <= r[producer(v)] + s[v]        v read by o
          sum size[v] s[v] <= budget           r, s in {0, 1}

This is the single-replay formulation of torch's min-cut partitioner with real prices in place of its 0 / inf
arcs. `docs/measured/planner.md` says how views, inputs and random ops are written in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

INF = math.inf


@dataclass(frozen=True)
class Problem:
    """What may be kept and what may run again, with prices.

    Attributes:
        cost: price of running op `o` again, in the cost model's unit; `inf` where it must not.
        reads: the values that op `o` reads.
        producer: the op that makes value `v` (region inputs are ops of cost `inf` that read nothing).
        size: bytes that keeping value `v` adds; `inf` where it cannot be kept (views: keep their base).
        need: the values that the backward reads.
    """

    cost: tuple[float, ...]
    reads: tuple[tuple[int, ...], ...]
    producer: tuple[int, ...]
    size: tuple[float, ...]
    need: frozenset[int] = frozenset()

    def free(self, value: int) -> bool:
        """Whether keeping it costs nothing (parameters, captured tensors)."""
        return self.size[value] == 0

    @cached_property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """The values each op makes."""
        made: list[list[int]] = [[] for _ in self.cost]
        for value, op in enumerate(self.producer):
            made[op].append(value)
        return tuple(map(tuple, made))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All ops as they can run one after another: as numbered, but what reads nothing (inputs) first."""
        return tuple(sorted(range(len(self.cost)), key=lambda op: (bool(self.reads[op]), op)))

    @cached_property
    def relevant(self) -> frozenset[int]:
        """The values from which something needed can be made: nothing else is ever worth keeping."""
        return self._behind(lambda value: True)

    @cached_property
    def certain(self) -> frozenset[int]:
        """What is there in every solution: what is needed, and what that must be made from again."""
        return self._behind(lambda value: self.size[value] == INF)

    def _behind(self, made: Callable[[int], bool]) -> frozenset[int]:
        """What is needed, and what such values are made from, for which `made` says so."""
        found = set(self.need)
        todo = list(found)
        while todo:
            value = todo.pop()
            fresh = {read for read in self.reads[self.producer[value]] if made(value)} - found
            found |= fresh
            todo += fresh
        return frozenset(found)


@dataclass(frozen=True)
class Solution:
    """A feasible choice: what is kept, what runs again, at what bytes and price."""

    saved: frozenset[int]
    replayed: frozenset[int]
    bytes: int
    cost: float


class Proven:
    """What has a `cost`, and the `lower_bound` that is proven for it."""

    cost: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """How far from optimal it can be at most, as a share of its cost."""
        return gap_of(self.cost, self.lower_bound)


def gap_of(cost: float, lower_bound: float) -> float:
    """How far from optimal a cost can be at most, as a share of it."""
    return max(0.0, (cost - lower_bound) / cost) if cost > 0 else 0.0


def complete(problem: Problem, saved: Iterable[int]) -> Solution | None:
    """The cheapest solution that keeps at most `saved`, or None where something needed is out of reach.

    What is free to keep need not be listed. Values that nothing reads and values whose op runs again anyway
    are dropped from `saved`.
    """
    offered = frozenset(saved)
    kept: set[int] = set()
    replayed: set[int] = set()
    todo, seen = list(problem.need), set(problem.need)
    while todo:
        value = todo.pop()
        if value in offered or problem.free(value):
            kept.add(value)
            continue
        op = problem.producer[value]
        if op in replayed:
            continue
        if problem.cost[op] == INF:
            return None
        replayed.add(op)
        fresh = [read for read in problem.reads[op] if read not in seen]
        seen.update(fresh)
        todo.extend(fresh)
    kept = {value for value in kept if problem.producer[value] not in replayed}
    size = sum(problem.size[v] for v in kept)
    if size == INF:
        return None
    cost = math.fsum(problem.cost[o] for o in replayed)
    return Solution(frozenset(kept), frozenset(replayed), int(size), cost)


def keep_all(problem: Problem) -> Solution | None:
    """What the backward reads, kept wherever it can be: the solution with the fewest ops run again."""
    return complete(problem, (v for v in problem.relevant if problem.size[v] < INF))
