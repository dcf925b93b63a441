"""Torch's own plans on the same graph: for the portfolio, and to compare with."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from remat.plan.graph import CostModel, Graph, is_view
from remat.plan.solve import INF, Problem
from remat.transforms import RematError, draws, map_only, traits
from remat.transforms.compat import partitioner_choice
from remat.transforms.joint import Joint, Ref

SOLVERS = ("dp", "ilp", "greedy")


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


def to_fx(joint: Joint) -> torch.fx.GraphModule:
    """The joint graph as AOTAutograd would hand it to a partitioner; node `v12` is value 12.

    Raises:
        RematError: where the function writes in place (AOTAutograd would have functionalized it).
    """
    if not joint.tensors:
        raise RematError(
            "This joint graph was recorded without tensors: write record(fn, args, tensors=True)."
        )
    graph = torch.fx.Graph()
    nodes: dict[int, torch.fx.Node] = {}
    counts = {"primals": 0, "tangents": 0}
    for v, value in enumerate(joint.values):
        if value.producer < 0:
            kind = "tangents" if value.origin == "tangent" else "primals"
            counts[kind] += 1
            nodes[v] = graph.create_node("placeholder", f"{kind}_{counts[kind]}", name=f"v{v}")
            nodes[v].meta["val"] = joint.tensors[v]
    for op in joint.ops:
        if op.mutates:
            raise RematError(
                f"{op.name} at {op.location} writes in place; torch's partitioner takes functional graphs."
            )
        args, kwargs = map_only(Ref, lambda r: nodes[r.id], (op.args, op.kwargs))
        single = len(op.outputs) == 1 and len(op.target._schema.returns) == 1
        single = single and isinstance(op.target._schema.returns[0].type, torch.TensorType)
        name = f"v{op.outputs[0]}" if single else None
        made = graph.create_node("call_function", op.target, args, kwargs, name=name)
        made.meta["val"] = (
            joint.tensors[op.outputs[0]] if single else tuple(joint.tensors[o] for o in op.outputs)
        )
        for k, o in enumerate(op.outputs):
            nodes[o] = (
                made
                if single
                else graph.create_node("call_function", operator.getitem, (made, k), name=f"v{o}")
            )
            nodes[o].meta["val"] = joint.tensors[o]
    graph.output([nodes[v] for v in (*joint.results, *joint.gradients)])
    return torch.fx.GraphModule(torch.nn.Module(), graph)


@dataclass(frozen=True)
class TorchPlan:
    """What torch would save at one budget: values of the joint graph, and the seconds it took to choose."""

    solver: str
    budget: float
    values: frozenset[int]
    seconds: float


def torch_plan(joint: Joint, budget: float, solver: str = "dp") -> TorchPlan:
    """The choice of `activation_memory_budget` with one of torch's solvers."""
    module = to_fx(joint)
    inputs = [v for v, value in enumerate(joint.values) if value.producer < 0 and value.origin != "tangent"]
    held = [k for k, v in enumerate(inputs) if joint.values[v].origin == "parameter"]
    start = time.perf_counter()
    names = partitioner_choice(module, len(joint.results), held, budget, solver)
    seconds = time.perf_counter() - start
    values = frozenset(int(name[1:]) for name in names if name[1:].isdigit())
    return TorchPlan(solver, budget, values, seconds)


def candidates(graph: Graph, budget: int, shares: Sequence[float] = (1.0, 0.9)) -> list[tuple[str, set[int]]]:
    """Torch's plans within `budget` bytes as saved sets of `graph.problem`, for `solve(candidates=...)`.

    None for in-place code, which torch's partitioner does not take. Torch counts its budget as a share of
    what its own default keeps, and may keep more than asked, so `shares` of it are asked for.
    """
    joint = graph.joint
    if not joint.tensors or any(op.mutates for op in joint.ops):
        return []
    share = min(budget / max(graph.kept_by_default, 1), 1.0)
    found = []
    for asked in dict.fromkeys(share * part for part in shares):
        plan = torch_plan(joint, asked)
        bases = {joint.family[joint.values[v].storage][0] for v in plan.values}
        found.append((f"torch (budget {asked:.2f})", set(graph.places(bases))))
    return found
