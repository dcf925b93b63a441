"""The planning problem as a partitioner of compiled graphs sees it, to compare with torch's plans."""

from __future__ import annotations

from dataclasses import dataclass

from remat.plan.graph import CostModel, is_view
from remat.plan.joint import Joint
from remat.plan.solve import INF, Problem
from remat.transforms import draws, traits


@dataclass(frozen=True)
class Compiled:
    """The planning problem as a partitioner of compiled graphs sees it, value by value.

    Differences from `Graph.problem`: results of one op are saved one by one, what does not depend on a
    cotangent counts as forward wherever autograd placed it, and random ops never run again.

    Attributes:
        problem: numbers values as the joint graph does.
        base: for each value the one to keep in its place (of a view, the value that owns the storage).
        late: positions of the ops that depend on a cotangent.
    """

    problem: Problem
    base: tuple[int, ...]
    late: frozenset[int]

    def saved(self, values: set[int]) -> frozenset[int]:
        """The values to keep so that all of `values` are there."""
        return frozenset(self.base[v] for v in values)


def compiled_problem(joint: Joint, model: CostModel) -> Compiled:
    """The problem of choosing what passes from a compiled forward to a compiled backward."""
    late = _after_tangents(joint)
    early = [k for k, op in enumerate(joint.ops) if k not in late]
    place = {k: n for n, k in enumerate(early)}
    inputs = [v for v, value in enumerate(joint.values) if value.producer < 0]
    cost = [_price(joint, k, model) for k in early] + [INF] * len(inputs)
    reads = [joint.ops[k].reads for k in early] + [()] * len(inputs)
    at_input = {v: len(early) + n for n, v in enumerate(inputs)}
    # Values made after the cotangents stand as products of a last op, which nothing asks for.
    producer = [
        at_input[v] if value.producer < 0 else place.get(value.producer, len(cost))
        for v, value in enumerate(joint.values)
    ]
    size = [_size(joint, v, late) for v in range(len(joint.values))]
    need = {v for k in late for v in joint.ops[k].reads} | {*joint.gradients}
    need = {v for v in need if joint.values[v].producer not in late and joint.values[v].origin != "tangent"}
    base = tuple(joint.family[value.storage][0] for value in joint.values)
    return Compiled(
        Problem((*cost, INF), (*reads, ()), tuple(producer), tuple(size), need=frozenset(need)),
        base,
        frozenset(late),
    )


def _after_tangents(joint: Joint) -> set[int]:
    """Positions of the ops that depend on a cotangent."""
    touched = {v for v, value in enumerate(joint.values) if value.origin == "tangent"}
    late = set()
    for k, op in enumerate(joint.ops):
        if touched.intersection(op.reads):
            late.add(k)
            touched.update(op.outputs)
    return late


def _price(joint: Joint, position: int, model: CostModel) -> float:
    op = joint.ops[position]
    facts = traits(op.target)
    if facts.outside or (facts.random and draws(op.target, op.args, op.kwargs)):
        return INF
    # What the forward has no use for is computed once, wherever that is.
    return 0.0 if is_view(joint, op) or not op.forward else model.price(joint, op)


def _size(joint: Joint, number: int, late: set[int]) -> float:
    value = joint.values[number]
    if value.producer < 0:
        return (
            0.0 if value.origin == "parameter" else INF if value.origin == "tangent" else float(value.bytes)
        )
    if value.producer in late or joint.family[value.storage][0] != number:
        return INF
    return float(joint.storages[value.storage])
