"""The ready policies as plans: what they would keep of a graph."""

from __future__ import annotations

from collections.abc import Sequence

from remat._core import Decision, OpInfo, TensorMeta
from remat.plan.graph import Graph
from remat.plan.joint import Ref
from remat.plan.solve import INF, Problem
from remat.policies import (
    Policy,
    check_verdict,
    save_attention,
    save_every_nth,
    save_everything,
    save_matmuls,
    save_nothing,
    save_weight_matmuls,
)
from remat.transforms import map_only

BUILT_IN_POLICIES: dict[str, Policy] = {
    "save_nothing": save_nothing,
    "save_attention": save_attention,
    "save_matmuls": save_matmuls,
    "save_weight_matmuls": save_weight_matmuls,
    "save_matmuls | save_attention": save_matmuls | save_attention,
    "save_every_nth(2, save_matmuls) | save_attention": save_every_nth(2, save_matmuls) | save_attention,
    "save_everything": save_everything,
}


def ready(graph: Graph, problem: Problem) -> list[tuple[str, set[int]]]:
    """What each of them keeps, by name: for `solve(candidates=...)`. No price changes it."""

    def found() -> list[tuple[str, set[int]]]:
        infos = op_infos(graph)
        return [(name, saved_by(policy, graph, problem, infos)) for name, policy in BUILT_IN_POLICIES.items()]

    return graph.solved.made("ready", found)


def saved_by(
    policy: Policy, graph: Graph, problem: Problem, infos: Sequence[OpInfo] | None = None
) -> set[int]:
    """The values of `graph.problem(...)` that a policy saves; inputs are always there to be kept."""
    infos = infos or op_infos(graph)
    policy = policy.fresh()
    inputs = {v for v in range(len(graph.ops), len(problem.size)) if problem.size[v] < INF}
    chosen = set()
    for position, (op, info) in enumerate(zip(graph.ops, infos, strict=True)):
        verdict = policy.decide_by_op(op.target) or check_verdict(policy, info, policy(info))
        if verdict is not Decision.RECOMPUTE and problem.size[position] < INF:
            chosen.add(position)
    return chosen | inputs


def op_infos(graph: Graph) -> list[OpInfo]:
    """What the engine would show a policy of each op (the user's calls are not known here)."""
    values = graph.joint.values
    metas = [TensorMeta(value.shape, value.dtype, value.device, value.stride) for value in values]
    found: list[OpInfo] = []
    for position, op in enumerate(graph.ops):
        args, kwargs = map_only(Ref, lambda r: metas[r.id], (op.args, op.kwargs))
        found.append(OpInfo(op.target, args, kwargs, tuple([metas[o] for o in op.outputs]), index=position))
    return found
