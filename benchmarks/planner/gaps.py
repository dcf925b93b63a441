"""How good and how quick the planner is, and how it compares with torch's on the same graphs.

    python -m benchmarks.planner --out benchmarks/results/planner.csv

Everything is computed from shapes: FLOPs and bytes are exact, "time" is a roofline model, and only the
seconds of the solvers are measured. One row per model, cost model, budget and planner:

- `equal`: the other planner's cost over ours at the bytes that it keeps (its name is in `planner`).
- `requested`: the same at the bytes that were asked for: what it left unused counts against it.
- planner "remat": the problem that the eager engine carries out, with no other planner beside it.
- "invalid": torch's plan draws random numbers anew, so its gradients would be wrong.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gc
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.records import RESULTS
from benchmarks.planner.compiled import compiled_problem
from benchmarks.planner.models import MODELS, joint
from remat import register_op
from remat.plan import Flops, Roofline
from remat.plan.compared import SOLVERS, TorchPlan, torch_plan
from remat.plan.graph import Graph
from remat.plan.joint import Joint
from remat.plan.solve import Problem, Solved, complete, keep_all, least, solve

Offer = Sequence[tuple[str, Iterable[int]]]
COLUMNS: Sequence[str] = (
    "model nodes cost unit planner budget asked_bytes gap trace_s build_s ours_s ours_cpu_s torch_s "
    "ours_bytes ours_cost torch_bytes torch_cost equal requested torch machine"
).split()
BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)
COSTS = {"flops": Flops(), "time": Roofline("h100", fused=True)}
register_op("remat_bench::attention", flops=lambda q, k, v: 4 * q[0] * q[1] * q[2] * k[2] * q[3])
register_op(
    "remat_bench::attention_backward", flops=lambda g, q, k, v, out: 10 * q[0] * q[1] * q[2] * k[2] * q[3]
)


def ratio(theirs: float, ours: float) -> float:
    """Their cost over ours; 1 where both are nothing."""
    return 1.0 if theirs == ours else theirs / ours if ours else float("inf")


def rows(name: str, time_limit: float) -> list[dict[str, Any]]:
    """All measurements of one model."""
    start = time.perf_counter()
    joint_graph = joint(name)
    traced = time.perf_counter() - start
    plans = [torch_plan(joint_graph, b, solver) for solver in SOLVERS for b in BUDGETS]
    found = []
    for cost, model in COSTS.items():
        base = {"model": name, "nodes": len(joint_graph.ops), "cost": cost, "unit": model.unit}
        base["trace_s"] = round(traced, 3)
        found += [base | row for row in alone(joint_graph, model, time_limit)]
        found += [base | row for row in against(joint_graph, model, plans, time_limit)]
    return found


def solved_row(
    problem: Problem, asked: int, time_limit: float, offer: Offer
) -> tuple[dict[str, Any], Solved]:
    """Our plan at one budget, in wall-clock and processor seconds."""
    # What tracing left behind is not collected on the solver's time.
    gc.collect()
    before = time.process_time()
    solved = solve(problem, asked, time_limit=time_limit, candidates=offer)
    return {
        "asked_bytes": asked,
        "gap": f"{solved.gap:.2e}",
        "ours_s": round(solved.seconds, 4),
        "ours_cpu_s": round(time.process_time() - before, 4),
        "ours_bytes": solved.solution.bytes,
        "ours_cost": solved.solution.cost,
    }, solved


def alone(joint_graph: Joint, model: Any, time_limit: float) -> Iterator[dict[str, Any]]:
    """What the eager engine carries out: gap and seconds only."""
    start = time.perf_counter()
    problem = Graph(joint_graph).problem(model)
    built = time.perf_counter() - start
    everything, floor = keep_all(problem), least(problem)
    assert everything is not None
    for budget in BUDGETS:
        asked = floor.bytes + int(budget * (everything.bytes - floor.bytes))
        row, _ = solved_row(problem, asked, time_limit, ())
        yield {"planner": "remat", "budget": budget, "build_s": round(built, 4)} | row


def against(
    joint_graph: Joint, model: Any, plans: Sequence[TorchPlan], time_limit: float
) -> Iterator[dict[str, Any]]:
    """Torch's plans, and ours at the bytes they keep and at those that were asked for."""
    compiled = compiled_problem(joint_graph, model)
    problem, floor = compiled.problem, least(compiled.problem)
    # Torch's share counts from the region's inputs to what its own default keeps.
    default = complete(problem, compiled.saved(set(torch_plan(joint_graph, 1.0).values)))
    assert default is not None
    offer = [(f"torch {p.solver}", compiled.saved(set(p.values))) for p in plans]
    at = functools.cache(lambda asked: solved_row(problem, asked, time_limit, offer))
    for plan in plans:
        theirs = complete(problem, compiled.saved(set(plan.values)))
        asked = floor.bytes + int(plan.budget * (default.bytes - floor.bytes))
        row, solved = at(asked)
        row = {"planner": plan.solver, "budget": plan.budget, "torch_s": round(plan.seconds, 4)} | row
        if theirs is None:
            yield row | {"torch_cost": "invalid"}
            continue
        equal = at(theirs.bytes)[1].solution
        within = theirs.bytes <= asked
        yield row | {
            "torch_bytes": theirs.bytes,
            "torch_cost": theirs.cost,
            "equal": round(ratio(theirs.cost, equal.cost), 4),
            "requested": round(ratio(theirs.cost, solved.solution.cost), 4) if within else "over",
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "planner.csv")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--time-limit", type=float, default=1.0)
    options = parser.parse_args()
    setting = {"torch": torch.__version__, "machine": platform.machine()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for name in options.models:
            writer.writerows(row | setting for row in rows(name, options.time_limit))
            file.flush()
            print(f"{name}: done", flush=True)
