"""How good and how quick the planner is, and how it compares with torch's on the same graphs.

    python benchmarks/planner.py --out benchmarks/results/planner.csv

Everything is computed from shapes: FLOPs and bytes are exact, "time" is a roofline model, and only the
seconds of the solvers are measured. One row per model, cost model, budget and planner:

- `equal`: the other planner's cost over ours at the bytes that it keeps (its name is in `planner`).
- `requested`: the same at the bytes that were asked for: what it left unused counts against it.
- "invalid": torch's plan draws random numbers anew, so its gradients would be wrong.
"""

from __future__ import annotations

import argparse
import csv
import platform
import time
from pathlib import Path
from typing import Any

import torch
from planner_models import MODELS, joint

from remat.plan import Flops, Roofline, register_cost
from remat.plan.problem import complete, keep_all
from remat.plan.solve import least, solve
from remat.plan.torch_plans import SOLVERS, compiled_problem, torch_plan

BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)
COSTS = {"flops": Flops(), "time": Roofline("h100", fused=True)}
register_cost("remat_bench::attention", lambda q, k, v: 4 * q[0] * q[1] * q[2] * k[2] * q[3])
register_cost(
    "remat_bench::attention_backward", lambda g, q, k, v, out: 10 * q[0] * q[1] * q[2] * k[2] * q[3]
)


def ratio(theirs: float, ours: float) -> float:
    """Their cost over ours; 1 where both are nothing."""
    return 1.0 if theirs == ours else theirs / ours if ours else float("inf")


def rows(name: str, time_limit: float) -> list[dict[str, Any]]:
    """All measurements of one model."""
    start = time.perf_counter()
    graph = joint(name)
    traced = time.perf_counter() - start
    plans = [torch_plan(graph, b, solver) for solver in SOLVERS for b in BUDGETS]
    found = []
    for cost, model in COSTS.items():
        compiled = compiled_problem(graph, model)
        problem = compiled.problem
        everything, floor = keep_all(problem), least(problem)
        # Torch's share counts from the region's inputs to what its own default keeps.
        default = complete(problem, compiled.saved(set(torch_plan(graph, 1.0).values)))
        assert everything is not None and default is not None
        base = {"model": name, "nodes": len(graph.ops), "cost": cost, "trace_s": round(traced, 3)}
        for plan in plans:
            theirs = complete(problem, compiled.saved(set(plan.values)))
            asked = floor.bytes + int(plan.budget * (default.bytes - floor.bytes))
            offer = [("torch", compiled.saved(set(plan.values)))]
            row = base | {"planner": plan.solver, "budget": plan.budget, "asked_bytes": asked}
            solved = solve(problem, asked, time_limit=time_limit, candidates=offer)
            row |= {"gap": solved.gap, "ours_s": round(solved.seconds, 4), "torch_s": round(plan.seconds, 4)}
            row |= {
                "ours_bytes": solved.solution.bytes,
                "ours_cost": solved.solution.cost,
                "unit": model.unit,
            }
            if theirs is None:
                found.append(row | {"torch_bytes": "", "torch_cost": "invalid", "equal": "", "requested": ""})
                continue
            equal = solve(problem, theirs.bytes, time_limit=time_limit, candidates=offer).solution
            row |= {"torch_bytes": theirs.bytes, "torch_cost": theirs.cost}
            found.append(
                row
                | {
                    "equal": round(ratio(theirs.cost, equal.cost), 4),
                    "requested": round(ratio(theirs.cost, solved.solution.cost), 4)
                    if theirs.bytes <= asked
                    else "over",
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "planner.csv")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--time-limit", type=float, default=1.0)
    options = parser.parse_args()
    setting = {"torch": torch.__version__, "machine": platform.machine()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = None
        for name in options.models:
            for row in rows(name, options.time_limit):
                row |= setting
                writer = writer or csv.DictWriter(file, list(row))
                if not file.tell():
                    writer.writeheader()
                writer.writerow(row)
            file.flush()
            print(f"{name}: done", flush=True)


if __name__ == "__main__":
    main()
