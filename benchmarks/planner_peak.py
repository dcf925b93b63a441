"""Recomputed FLOPs at equal simulated peak: our plans against torch's `activation_memory_budget`.

    python benchmarks/planner_peak.py --out benchmarks/results/planner_peak.csv

Both choose what a compiled forward hands to a compiled backward, from the same joint graph, at the same
number of budgets. The backward runs as torch lays it out (`reordering_to_mimic_autograd_engine`): what runs
again does so right before its first reader. Live bytes are counted storage by storage, no fusion, gradients
included; a saved storage goes after its last reader. One row per plan; the last row of a model gives, over
all peaks that torch reaches, the geometric mean of (fewest FLOPs of torch's plans within that peak) /
(fewest of ours), and the lowest peaks of both.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from planner_models import MODELS, GPTBlock, Stack, joint

from remat.plan import Flops
from remat.plan.costs import flops_of
from remat.plan.hull import hull
from remat.plan.peak import live_bytes
from remat.plan.problem import Solution, complete
from remat.plan.solve import solve
from remat.plan.torch_plans import Compiled, compiled_problem, torch_plan
from remat.transforms._joint import Joint, Op

MODELS["GPT 16"] = lambda: (Stack(lambda: GPTBlock(1024, 16), 16), [(4, 2048, 1024)], [])


def backward(graph: Joint, saved: frozenset[int], late: frozenset[int]) -> list[Op]:
    """The ops of the compiled backward in order."""
    done: set[int] = set()
    order: list[Op] = []

    def run(position: int) -> None:
        todo = [position]
        while todo:
            op = graph.ops[todo[-1]]
            makers = {graph.values[v].producer for v in op.reads if v not in saved}
            missing = [m for m in makers if m >= 0 and m not in done]
            if missing:
                todo += sorted(missing, reverse=True)
                continue
            if (last := todo.pop()) not in done:
                done.add(last)
                order.append(op)

    for position in sorted(late):
        run(position)
    return order


def measure(graph: Joint, compiled: Compiled, late: frozenset[int], found: Solution) -> tuple[float, int]:
    """FLOPs run again, and the most bytes live in the backward."""
    ops = backward(graph, found.saved, late)
    again = [op for op in ops if op.forward]
    kept = {graph.values[v].storage for v in found.saved if graph.values[v].producer >= 0}
    results = {graph.values[v].storage for v in graph.gradients}
    return sum(flops_of(graph, op) for op in again), live_bytes(graph, ops, start=kept, forever=results)


def plans(name: str, count: int) -> Iterator[dict[str, Any]]:
    """All plans of a model."""
    graph = joint(name)
    compiled = compiled_problem(graph, Flops())
    problem, late = compiled.problem, compiled.late
    corners = hull(problem)
    low, high = corners[0].bytes, corners[-1].bytes
    for k in range(count + 1):
        share = k / count
        theirs = complete(problem, compiled.saved(set(torch_plan(graph, share).values)))
        ours = solve(problem, int(low + share * (high - low)), time_limit=1.0).solution
        for planner, found in (("torch dp", theirs), ("remat", ours)):
            if found is not None:
                flops, peak = measure(graph, compiled, late, found)
                yield {
                    "model": name,
                    "planner": planner,
                    "budget": round(share, 4),
                    "kept_bytes": found.bytes,
                    "peak_bytes": peak,
                    "flops": flops,
                }


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The summary row."""
    at = {
        p: [(r["peak_bytes"], r["flops"]) for r in rows if r["planner"] == p] for p in ("torch dp", "remat")
    }
    least = {p: min(peak for peak, _ in points) for p, points in at.items()}
    ratios, free = [], 0
    for limit in sorted({peak for peak, _ in at["torch dp"]}):
        best = {p: min((f for peak, f in points if peak <= limit), default=None) for p, points in at.items()}
        if best["remat"] is not None and best["torch dp"]:
            if best["remat"] == 0:
                free += 1
            else:
                ratios.append(best["torch dp"] / best["remat"])
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else float("nan")
    return {
        "model": rows[0]["model"],
        "planner": "ratio",
        "ratio_geomean": round(mean, 4),
        "ratio_min": round(min(ratios), 4) if ratios else "",
        "ratio_max": round(max(ratios), 4) if ratios else "",
        "peaks": len(ratios),
        "peaks_where_ours_runs_nothing_again": free,
        "torch_lowest_peak": least["torch dp"],
        "remat_lowest_peak": least["remat"],
    }


COLUMNS = (
    "model planner budget kept_bytes peak_bytes flops ratio_geomean ratio_min ratio_max peaks "
    "peaks_where_ours_runs_nothing_again torch_lowest_peak remat_lowest_peak torch"
).split()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "planner_peak.csv")
    parser.add_argument("--models", nargs="*", default=["GPT 16", "Llama 16"], choices=list(MODELS))
    parser.add_argument("--budgets", type=int, default=40)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for name in options.models:
            rows = list(plans(name, options.budgets))
            summary = compare(rows)
            writer.writerows(row | {"torch": torch.__version__} for row in (*rows, summary))
            file.flush()
            print(summary, flush=True)


if __name__ == "__main__":
    main()
