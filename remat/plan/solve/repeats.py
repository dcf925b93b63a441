"""Identical layers, found in the numbers of a problem, so that they are solved as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from remat.plan.solve.problem import Problem

# A read of a layer: the reader's op and the producer as positions in the layer, the value among that op's
# results, and how many layers back it was made.
Link = tuple[int, int, int, int]


@dataclass(frozen=True)
class Repeats:
    """`count` equal layers of `period` ops from op `start` on, followed by at least one more.

    That last one and whatever comes before are not part of the run: they are what it is tied to.
    """

    problem: Problem
    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The first op behind the run: the beginning of the layer that follows it."""
        return self.start + self.period * self.count

    def inside(self, op: int) -> bool:
        """Whether an op belongs to one of the layers."""
        return self.start <= op < self.stop

    def first(self, op: int) -> int:
        """The op of the first layer that is like this one; others stand for themselves."""
        return self.start + (op - self.start) % self.period if self.inside(op) else op

    def layer(self, op: int) -> int:
        """The number of the layer."""
        return (op - self.start) // self.period

    def like(self, value: int, op: int) -> int:
        """The value that `op` makes in the place where its own op makes `value`."""
        outputs = self.problem.outputs
        return outputs[op][value - outputs[self.problem.producer[value]][0]]

    def represents(self, value: int) -> int:
        """The value of the first layer that is like this one."""
        op = self.problem.producer[value]
        return self.like(value, self.first(op)) if self.inside(op) else value

    @cached_property
    def ties(self) -> dict[int, tuple[frozenset[int], frozenset[int]]]:
        """For each op of the first layer: what all layers read alike, and what each reads of its own."""
        found = {}
        for op in range(self.start, self.start + self.period):
            here, there = (frozenset(self.problem.reads[o]) for o in (op, op + self.period))
            found[op] = (here & there, here - there)
        return found

    def shifted(self, value: int, layers: int) -> int:
        """The like of a value so many layers on."""
        return self.like(value, self.problem.producer[value] + layers * self.period)

    def holds(self) -> bool:
        """Whether every layer, the one behind the run included, reads as the first one does."""
        for op, (common, own) in self.ties.items():
            for k in range(1, self.count + 1):
                expected = common | {self.shifted(v, k) for v in own}
                if expected != set(self.problem.reads[op + k * self.period]):
                    return False
        return True


def repeats(problem: Problem) -> Repeats | None:
    """The longest run of identical layers, or None where there are fewer than three in a row.

    The problem is one made by `reduce`: nothing in it is free, and an op's values are numbered together.
    Layers need not begin where the user's do: they are found by their period.
    """
    best, kinds = None, _kinds(problem)
    for period in _periods(kinds):
        for start, length in _runs(problem, kinds, period):
            run = Repeats(problem, start, period, length // period)
            if run.count >= 2 and (best is None or run.count * period > best.count * best.period):
                best = run if run.holds() else best
    return best


def _kinds(problem: Problem) -> list[Hashable]:
    """What an op looks like on its own."""
    return [
        (cost, *((problem.size[v], problem.price(v), v in problem.need) for v in outputs), len(reads))
        for cost, outputs, reads in zip(problem.cost, problem.outputs, problem.reads, strict=True)
    ]


def _periods(kinds: Sequence[Hashable]) -> list[int]:
    """The commonest distances between ops that look alike, shortest first."""
    places: dict[Hashable, list[int]] = {}
    for op, kind in enumerate(kinds):
        places.setdefault(kind, []).append(op)
    # An op may look like a few others of its own layer: the next ones are looked at too.
    near = Counter(
        b - a for ops in places.values() for hop in range(1, 9) for a, b in zip(ops, ops[hop:], strict=False)
    )
    return sorted(period for period, times in near.most_common(8) if times > 1)


def _runs(problem: Problem, kinds: Sequence[Hashable], period: int) -> Iterator[tuple[int, int]]:
    """Stretches `(start, length)` of ops that are like the op one period on."""
    outputs, count = problem.outputs, len(problem.cost)

    def alike(op: int) -> bool:
        if kinds[op] != kinds[op + period]:
            return False
        here, there = set(problem.reads[op]), set(problem.reads[op + period])
        for value in here - there:
            maker = problem.producer[value]
            later, index = maker + period, value - outputs[maker][0]
            if later >= count or index >= len(outputs[later]) or outputs[later][index] not in there:
                return False
        return len(here) == len(there)

    start = None
    for op in range(count - period + 1):
        if op < count - period and alike(op):
            start = op if start is None else start
        elif start is not None:
            yield start, op - start
            start = None
