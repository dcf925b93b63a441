"""A smaller problem with the same solutions: no views, and nothing that is free, certain or of no use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from remat.plan.solve.problem import INF, Problem, Solution, complete


@dataclass(frozen=True)
class Reduced:
    """A problem without views.

    An op that costs nothing and whose results cannot be kept is there whenever what it reads is: who reads
    it reads that instead. Half of a transformer's ops are such views. Ops keep their order, and the values
    of an op are numbered one after another.

    Attributes:
        problem: the smaller problem.
        values: for each of its values the number in the original.
    """

    problem: Problem
    values: tuple[int, ...]

    def named(self, values: Iterable[int]) -> tuple[int, ...]:
        """Values of the smaller problem in the original's numbers."""
        return tuple([self.values[v] for v in values])

    def whole(self, problem: Problem, solution: Solution) -> Solution:
        """A solution of the smaller problem as one of the original."""
        found = complete(problem, self.named(solution.saved))
        assert found is not None
        return found


def reduce(problem: Problem) -> Reduced:
    """`problem` without its views and without what nothing needs."""
    behind = _behind(problem)
    need = frozenset(b for v in problem.need for b in behind[v])
    ops, reads = _wanted(problem, behind, need)
    place = {op: k for k, op in enumerate(ops)}
    # All results of an op stay, so that equal ops stay equal; only what is free is gone.
    values = [v for op in ops for v in problem.outputs[op] if not problem.free(v)]
    number = {v: k for k, v in enumerate(values)}
    smaller = Problem(
        cost=tuple(problem.cost[op] for op in ops),
        reads=tuple(tuple(sorted(number[v] for v in reads[op])) for op in ops),
        producer=tuple(place[problem.producer[v]] for v in values),
        size=tuple(problem.size[v] for v in values),
        need=frozenset(number[v] for v in need),
    )
    return Reduced(smaller, tuple(values))


def _behind(problem: Problem) -> dict[int, frozenset[int]]:
    """For each value the values that stand for it: itself, what it is a view of, or nothing if it is free."""
    found: dict[int, frozenset[int]] = {}
    for op in problem.order:
        made = problem.outputs[op]
        # What reads nothing and cannot be kept is no view of anything, but costs nothing to have either.
        view = problem.cost[op] == 0 and all(problem.size[v] == INF for v in made)
        looked_at = frozenset().union(*(found[read] for read in problem.reads[op])) if view else None
        for value in made:
            own = frozenset((value,)) if looked_at is None else looked_at
            found[value] = frozenset() if problem.free(value) else own
    return found


def _wanted(
    problem: Problem, behind: dict[int, frozenset[int]], need: frozenset[int]
) -> tuple[list[int], dict[int, frozenset[int]]]:
    """The ops from which something needed can be made, in order, and what they read."""
    reads: dict[int, frozenset[int]] = {}
    todo = [problem.producer[v] for v in need]
    while todo:
        op = todo.pop()
        if op not in reads:
            reads[op] = frozenset(b for v in problem.reads[op] for b in behind[v])
            todo += [problem.producer[v] for v in reads[op]]
    return sorted(reads), reads


def contract(problem: Problem) -> Reduced:
    """`problem` without views, and without reads of what is there in every solution.

    Nothing waits for that: it alone takes most models apart (see `split`).

    Example:
        >>> from remat.plan.solve.problem import INF, Problem
        >>> # An input, an op that needs it, and an op that reads what that makes: both are needed.
        >>> reads, size = ((), (0,), (1,)), (8.0, 8.0, 2.0)
        >>> whole = Problem((INF, 1.0, 5.0), reads, (0, 1, 2), size, need=frozenset({1, 2}))
        >>> contract(whole).problem.reads
        ((), (0,), ())
    """
    first = reduce(problem)
    need = first.problem.certain
    reads = tuple(tuple(v for v in read if v not in need) for read in first.problem.reads)
    apart = reduce(replace(first.problem, reads=reads, need=need))
    return Reduced(apart.problem, first.named(apart.values))
