"""A problem as independent parts, equal ones found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat.plan.solve.problem import Problem


@dataclass(frozen=True)
class Part:
    """A part of a problem, and the places where the like of it stands.

    Attributes:
        problem: the part on its own, each op behind those it reads of.
        places: for each part that is like it, the numbers of its values in the whole.
    """

    problem: Problem
    places: tuple[tuple[int, ...], ...]


def split(problem: Problem) -> list[Part]:
    """Parts without a constraint in common but the budget; the layers of a model are alike, as a rule.

    What is free to keep ties nothing to anything.
    """
    likes: dict[Problem, list[tuple[int, ...]]] = {}
    for ops in _groups(problem):
        part, values = _alone(problem, ops)
        likes.setdefault(part, []).append(values)
    return [Part(part, tuple(places)) for part, places in likes.items()]


def _groups(problem: Problem) -> Iterable[list[int]]:
    """The ops that something needed can be made with, by connection, in an order that can be run."""
    makers = {problem.producer[v] for v in problem.relevant}
    ops = [op for op in problem.order if op in makers]
    reads = {op: _ties(problem, op) for op in ops}
    parent = {op: op for op in ops}

    def root(op: int) -> int:
        while parent[op] != op:
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op

    for op, values in reads.items():
        for value in values:
            parent[root(problem.producer[value])] = root(op)
    groups: dict[int, list[int]] = {}
    for op in ops:
        groups.setdefault(root(op), []).append(op)
    return groups.values()


def _ties(problem: Problem, op: int) -> tuple[int, ...]:
    return tuple(v for v in problem.reads[op] if not problem.free(v))


def _alone(problem: Problem, ops: Sequence[int]) -> tuple[Problem, tuple[int, ...]]:
    """The ops as a problem of their own, and the numbers of its values in the whole."""
    values = tuple(v for op in ops for v in problem.outputs[op] if v in problem.relevant)
    number = {v: k for k, v in enumerate(values)}
    place = {op: k for k, op in enumerate(ops)}
    part = Problem(
        cost=tuple(problem.cost[op] for op in ops),
        reads=tuple(tuple(number[v] for v in _ties(problem, op)) for op in ops),
        producer=tuple(place[problem.producer[v]] for v in values),
        size=tuple(problem.size[v] for v in values),
        need=frozenset(number[v] for v in values if v in problem.need),
    )
    return part, values
