"""Torch's own plans on the same graph, to compare with."""

from __future__ import annotations

import math
import operator
import time
from dataclasses import dataclass, replace

import torch

from remat._torch import as_inductor_gets_it, partitioner_choice
from remat.plan.graph import Graph
from remat.plan.joint import Joint, Ref
from remat.transforms import RematError, map_only, traits
from remat.transforms.compat import fake_mode, outside_all_modes

SOLVERS = ("dp", "ilp", "greedy")


def to_fx(joint: Joint) -> torch.fx.GraphModule:
    """The joint graph as AOTAutograd would hand it to a partitioner; node `v12` is value 12.

    Raises:
        RematError: where the function writes in place (AOTAutograd would have functionalized it).
    """
    graph, tensors = torch.fx.Graph(), _stand_ins(joint)
    nodes: dict[int, torch.fx.Node] = {}
    counts = {"primals": 0, "tangents": 0}
    for v, value in enumerate(joint.values):
        if value.producer < 0:
            kind = "tangents" if value.origin == "tangent" else "primals"
            counts[kind] += 1
            nodes[v] = graph.create_node("placeholder", f"{kind}_{counts[kind]}", name=f"v{v}")
            nodes[v].meta["val"] = tensors[v]
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
        made.meta["val"] = tensors[op.outputs[0]] if single else tuple(tensors[o] for o in op.outputs)
        for k, o in enumerate(op.outputs):
            nodes[o] = (
                made
                if single
                else graph.create_node("call_function", operator.getitem, (made, k), name=f"v{o}")
            )
            nodes[o].meta["val"] = tensors[o]
    graph.output([nodes[v] for v in (*joint.results, *joint.gradients)])
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _stand_ins(joint: Joint) -> list[torch.Tensor]:
    """A fake tensor for every value."""
    with outside_all_modes(), fake_mode([]):
        return [
            # Of a sparse one (no strides are known) the size is all that a planner looks at.
            torch.empty_strided(v.shape, v.stride, dtype=v.dtype, device=v.device)
            if len(v.stride) == len(v.shape)
            else torch.empty(v.shape, dtype=v.dtype, device=v.device)
            for v in joint.values
        ]


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


def compiler_keeps_no_more(graph: Graph, values: int, inputs: int) -> bool:
    """Whether Inductor's partitioner, left to itself, keeps at most `values` bytes that ops have made, and so
    many with `inputs` bytes of arguments.

    It sees a graph in its parts, and may keep a mask of one byte an element where a plan has a float.
    """
    if not graph.alone or not values:
        return False
    made, given = graph.solved.made("compiler", lambda: _kept_by_compiler(graph.joint))
    return made <= values and made + given <= values + inputs


def _kept_by_compiler(joint: Joint) -> tuple[float, float]:
    """Bytes that Inductor's partitioner keeps: of what ops make, and of arguments; infinite if unknown."""
    try:
        with outside_all_modes():
            module = as_inductor_gets_it(to_fx(_without_writes(joint)))
            inputs = [v for v, value in enumerate(joint.values) if value.producer < 0]
            held = [k for k, v in enumerate(inputs) if joint.values[v].origin == "parameter"]
            names = {*partitioner_choice(module, len(joint.results), held, 1.0, "dp")}
    except Exception:
        # Private code of torch, asked about graphs that it has not made: then the plan is carried out.
        return math.inf, math.inf
    bases = {_base(node) for node in module.graph.nodes if node.name in names}
    made = sum(node.meta["val"].nbytes for node in bases if node.op != "placeholder")
    arguments = [node for k, node in enumerate(module.graph.find_nodes(op="placeholder")) if k not in held]
    return made, sum(node.meta["val"].nbytes for node in bases.intersection(arguments))


def _without_writes(joint: Joint) -> Joint:
    """The graph with new results in the place of writes, where no view looks at what is written."""
    ops = list(joint.ops)
    for at, op in enumerate(ops):
        name, alone = op.target.__name__, len(op.mutates) == len(op.outputs) == 1
        packet = getattr(torch.ops.aten, name.partition(".")[0].removesuffix("_"), None)
        makers = {joint.values[v].producer for m in op.mutates for v in joint.family[joint.values[m].storage]}
        if alone and packet is not None and not any(traits(ops[k].target).view for k in makers if k >= 0):
            ops[at] = replace(op, target=getattr(packet, op.target._overloadname), mutates=())
    return replace(joint, ops=tuple(ops))


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """What a node is a view of, or itself."""
    while node.op == "call_function" and traits(node.target).view:
        node = node.all_input_nodes[0]
    return node
