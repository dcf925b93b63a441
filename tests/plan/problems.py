"""Random planning problems, and what brute force says of them."""

import itertools
import math

from hypothesis import strategies as st

from tests.plan.inside import INF, Problem, complete


@st.composite
def problems(draw, ops=7):
    """Random graphs with inputs, ops that must not run again, views and ops of two outputs."""
    count = draw(st.integers(2, ops))
    cost, reads, producer, size = [], [], [], []
    for op in range(count):
        pool = list(range(len(producer)))
        is_input = not pool or draw(st.integers(0, 5)) == 0
        reads.append(
            () if is_input else tuple(sorted(draw(st.sets(st.sampled_from(pool), min_size=1, max_size=3))))
        )
        cost.append(INF if is_input or draw(st.integers(0, 7)) == 0 else float(draw(st.integers(0, 9))))
        for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
            producer.append(op)
            kept = cost[-1] == INF or draw(st.integers(0, 4)) > 0
            size.append(float(draw(st.integers(0, 6))) if kept else INF)
    need = draw(st.sets(st.sampled_from(range(len(producer))), min_size=1, max_size=5))
    return Problem(tuple(cost), tuple(reads), tuple(producer), tuple(size), frozenset(need))


def frontier(problem):
    """Every feasible choice, by trying all saved sets."""
    savable = [v for v in problem.relevant if problem.size[v] < INF]
    chosen = (c for n in range(len(savable) + 1) for c in itertools.combinations(savable, n))
    return [s for c in chosen if (s := complete(problem, c)) is not None]


def check(problem, solution):
    """Every constraint of the formulation, written out."""
    for value in problem.need:
        assert value in solution.saved or problem.producer[value] in solution.replayed
    for op in solution.replayed:
        assert problem.cost[op] < INF
        for value in problem.reads[op]:
            assert value in solution.saved or problem.producer[value] in solution.replayed
    assert solution.bytes == sum(problem.size[v] for v in solution.saved)
    assert math.isclose(solution.cost, sum(problem.cost[o] for o in solution.replayed))


def best(problem, budget):
    """The least price within a budget, INF where nothing fits."""
    return min((p.cost for p in frontier(problem) if p.bytes <= budget), default=INF)


@st.composite
def layered(draw):
    """Equal layers that read of the layer before, of themselves, and of one shared input."""
    width, count = draw(st.sampled_from([(2, 5), (2, 4), (3, 3), (3, 4)]))
    cost, reads, producer, size, need = [INF], [()], [0], [float(draw(st.integers(0, 3)))], set()
    template = []
    for op in range(width):
        sources = draw(st.sets(st.integers(-width, op - 1), min_size=1, max_size=2))
        template.append(
            (sources, draw(st.booleans()), float(draw(st.integers(1, 9))), float(draw(st.integers(1, 5))))
        )
    needed = draw(st.sets(st.integers(0, width - 1), min_size=1))
    for layer in range(count):
        for op, (sources, shared, price, bytes_) in enumerate(template):
            made = [1 + layer * width + s for s in sources]
            reads.append(tuple(sorted({max(v, 0) for v in made} | ({0} if shared else set()))))
            need |= {len(producer)} if op in needed else set()
            producer.append(len(cost))
            cost.append(price)
            size.append(bytes_)
    return Problem(tuple(cost), tuple(reads), tuple(producer), tuple(size), need=frozenset(need))
