"""A smaller problem with the same optimum: choices that another choice beats are taken away."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from remat.plan.solve.problem import INF, Problem
from remat.plan.solve.reduce import Reduced, reduce


def contract(problem: Problem) -> Reduced:
    """`problem` without views and without values that need not be kept in a best solution at any budget.

    What the backward needs is there in every solution, so that nothing waits for it: that alone takes most
    models apart (see `split`). Of a chain of copies one stays. Not every solution of the whole is one of the
    smaller problem, but one that is as cheap and as small.

    Example:
        >>> from remat.plan.solve.problem import INF, Problem
        >>> # An input of 8 bytes, a copy of it, and an op that needs the copy.
        >>> reads, size = ((), (0,), (1,)), (8.0, 8.0, 2.0)
        >>> whole = Problem((INF, 0.0, 5.0), reads, (0, 1, 2), size, need=frozenset({0, 2}))
        >>> contract(whole).problem.reads
        ((), ())
    """
    smaller = reduce(problem)
    values = smaller.values
    while True:
        fewer = _restricted(smaller.problem)
        if fewer is None:
            return Reduced(smaller.problem, values)
        smaller = reduce(fewer)
        values = tuple(values[v] for v in smaller.values)


def _restricted(problem: Problem) -> Problem | None:
    """The same problem with fewer values that may be kept and fewer reads, or None where none can go."""
    need = problem.certain
    reads = tuple(tuple(v for v in read if v not in need) for read in problem.reads)
    problem, before = replace(problem, reads=reads, need=need), problem
    sizes = list(problem.size)
    while _later(problem, sizes) + _sooner(problem, sizes):
        pass
    if sizes == list(problem.size) and reads == before.reads and need == before.need:
        return None
    return replace(problem, size=tuple(sizes))


def _within(problem: Problem, sizes: list[float], these: Iterable[int], value: int, cost: float) -> bool:
    """Whether keeping `these` at a further cost takes no more bytes and no higher price than `value`."""
    size = 0.0
    for v in these:
        size, cost = size + sizes[v], cost + problem.price(v)
    return size <= sizes[value] and cost <= problem.price(value)


def _later(problem: Problem, sizes: list[float]) -> int:
    """Bar the values that all of what is made from them can stand for, and count them."""
    readers: dict[int, list[int]] = {}
    relevant = problem.relevant
    for op in {problem.producer[v] for v in relevant}:
        for value in problem.reads[op]:
            readers.setdefault(value, []).append(op)
    count = 0
    for value in sorted(relevant - problem.need):
        if sizes[value] < INF and problem.cost[problem.producer[value]] < INF:
            made = {v for op in readers[value] for v in problem.outputs[op] if v in relevant}
            if _within(problem, sizes, made, value, 0.0):
                sizes[value] = INF
                count += 1
    return count


def _sooner(problem: Problem, sizes: list[float]) -> int:
    """Bar the values that can be made from what is as small, at no cost, and count them."""
    count = 0
    for value in sorted(problem.relevant):
        op = problem.producer[value]
        if sizes[value] < INF and _within(problem, sizes, problem.reads[op], value, problem.cost[op]):
            sizes[value] = INF
            count += 1
    return count
