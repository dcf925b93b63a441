"""What a part of a problem can cost at how many bytes: all choices that may be worth it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from remat.plan.solve.problem import INF, Problem

# More states between two ops than this are given up: the part is too tangled.
_STATES = 256

# From a state to the next one: that state, bytes, price, and the values kept.
Step = tuple[int, int, int, tuple[int, ...]]


class States:
    """A part op by op: a state says which values that later ops read are there, one bit for each.

    An op either runs again, if what it reads is there, or some of its values are kept, or neither. With few
    values alive between ops, as in layers, that is a short table. Prices are whole numbers.

    Source: dynamic programming over a path decomposition, as in H. L. Bodlaender, "Dynamic programming on
    graphs with bounded treewidth", 1988.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.last = {v: op for op, read in enumerate(problem.reads) for v in read}
        self.bit: dict[int, int] = {}
        self.table: list[dict[int, list[Step]]] | None = []
        states, spare = [0], []
        for op in range(len(problem.cost)):
            for value in problem.outputs[op]:
                if value in self.last:
                    self.bit[value] = spare.pop() if spare else 1 << len(self.bit)
            # An op of many results has that many ways to keep some of them.
            here = self._steps(op, states) if 1 << len(self._optional(op)) <= _STATES else None
            states = list(dict.fromkeys(step[0] for steps in (here or {}).values() for step in steps))
            if here is None or len(states) > _STATES:
                self.table = None
                return
            self.table.append(here)
            spare += [self.bit[v] for v in problem.reads[op] if self.last[v] == op]

    def _steps(self, op: int, states: Iterable[int]) -> dict[int, list[Step]]:
        problem = self.problem
        reads = sum(self.bit[v] for v in problem.reads[op])
        live = ~sum(self.bit[v] for v in problem.reads[op] if self.last[v] == op)
        made = sum(self.bit.get(v, 0) for v in problem.outputs[op])
        ways = list(self._ways(op))
        again = None if problem.cost[op] == INF else int(problem.cost[op])
        found: dict[int, list[Step]] = {}
        for state in states:
            found[state] = [((state | there) & live, size, price, kept) for there, size, price, kept in ways]
            if again is not None and state & reads == reads:
                found[state].append(((state | made) & live, 0, again, ()))
        return found

    def _optional(self, op: int) -> list[int]:
        """The values of an op that nothing needs but that later ops could read."""
        problem, need = self.problem, self.problem.need
        return [v for v in problem.outputs[op] if v in self.last and v not in need and problem.size[v] < INF]

    def _ways(self, op: int) -> Iterable[Step]:
        """What may be kept of an op that does not run again: what is needed, any of what is read later."""
        problem, made = self.problem, self.problem.outputs[op]
        must = tuple(v for v in made if v in problem.need)
        if any(problem.size[v] == INF for v in must):
            return
        may = self._optional(op)
        for more in itertools.chain.from_iterable(
            itertools.combinations(may, count) for count in range(len(may) + 1)
        ):
            kept = must + more
            there = sum(self.bit.get(v, 0) for v in kept)
            yield there, int(sum(problem.size[v] for v in kept)), 0, kept

    def least(self, price: int, byte: int) -> list[dict[int, int]]:
        """For each op and state the least `price * cost + byte * bytes` from there on."""
        assert self.table is not None
        found = [{0: 0}]
        for here in reversed(self.table):
            after, before = found[-1], {}
            for state, steps in here.items():
                ways = [price * c + byte * b + after[q] for q, b, c, _ in steps if q in after]
                if ways:
                    before[state] = min(ways)
            found.append(before)
        return found[::-1]
