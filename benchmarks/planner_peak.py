"""Recomputed FLOPs at equal simulated peak: our plans against torch's `activation_memory_budget`.

    python benchmarks/planner_peak.py --out benchmarks/results/planner_peak.csv

Both choose what a compiled forward hands to a compiled backward, from the same joint graph. Torch is asked at
evenly spaced budgets; at every peak that it reaches, its best plan within that peak is compared with the one
that `highest_within` finds, the search behind `checkpoint_policy(peak=...)`. The backward runs as torch lays
it out (`reordering_to_mimic_autograd_engine`): what runs again does so right before its first reader. Live
bytes are counted storage by storage, no fusion, gradients included; a saved storage goes after its last
reader. `asked` is a share for torch and a peak in bytes for us. The last row of a model has the geometric
mean of torch's FLOPs over ours, and the lowest peaks of both.
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from planner_models import MODELS, GPTBlock, Stack, joint

from remat.plan import Flops
from remat.plan.costs import flops_of
from remat.plan.hull import hull
from remat.plan.peak import highest_within, live_bytes
from remat.plan.problem import Solution, complete
from remat.plan.solve import solve
from remat.plan.torch_plans import compiled_problem, torch_plan
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


class Search:
    """Both planners on one model."""

    def __init__(self, name: str) -> None:
        self.name, self.graph = name, joint(name)
        self.compiled = compiled_problem(self.graph, Flops())
        corners = hull(self.compiled.problem)
        self.low, self.high = corners[0].bytes, corners[-1].bytes
        self.ours = functools.cache(self._ours)

    def row(self, planner: str, asked: float, found: Solution) -> dict[str, Any]:
        """One plan: FLOPs run again, and the most bytes live in the backward."""
        ops = backward(self.graph, found.saved, self.compiled.late)
        values = self.graph.values
        kept = {values[v].storage for v in found.saved if values[v].producer >= 0}
        results = {values[v].storage for v in self.graph.gradients}
        return {
            "model": self.name,
            "planner": planner,
            "asked": asked,
            "kept_bytes": found.bytes,
            "peak_bytes": live_bytes(self.graph, ops, start=kept, forever=results),
            "flops": sum(flops_of(self.graph, op) for op in ops if op.forward),
        }

    def _ours(self, budget: int) -> dict[str, Any]:
        return self.row("remat", budget, solve(self.compiled.problem, budget, time_limit=0.5).solution)

    def theirs(self, count: int) -> Iterator[dict[str, Any]]:
        """Torch's plans at evenly spaced budgets."""
        for k in range(count + 1):
            saved = self.compiled.saved(set(torch_plan(self.graph, k / count).values))
            found = complete(self.compiled.problem, saved)
            if found is not None:
                yield self.row("torch dp", round(k / count, 4), found)

    def within(self, limit: int) -> dict[str, Any]:
        """Our plan for a peak, as `checkpoint_policy(peak=...)` looks for it."""
        return highest_within(limit, self.low, self.high, self.ours, lambda row: row["peak_bytes"])

    def lowest(self) -> int:
        """The lowest peak of ours on the grid of that search."""
        grid = (self.low + (self.high - self.low) * k // 64 for k in range(65))
        return min(self.ours(budget)["peak_bytes"] for budget in grid)


def compare(search: Search, count: int) -> list[dict[str, Any]]:
    """All plans, and the summary."""
    torchs = list(search.theirs(count))
    ratios, free, rows = [], 0, list(torchs)
    for limit in sorted({row["peak_bytes"] for row in torchs}):
        theirs = min(row["flops"] for row in torchs if row["peak_bytes"] <= limit)
        ours = search.within(limit)
        rows.append(ours | {"asked": limit, "planner": "remat within that peak"})
        if theirs and not ours["flops"]:
            free += 1
        elif theirs:
            ratios.append(theirs / ours["flops"])
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else float("nan")
    summary = {
        "model": search.name,
        "planner": "ratio",
        "ratio_geomean": round(mean, 4),
        "ratio_min": round(min(ratios), 4) if ratios else "",
        "ratio_max": round(max(ratios), 4) if ratios else "",
        "peaks": len(ratios),
        "peaks_where_ours_runs_nothing_again": free,
        "torch_lowest_peak": min(row["peak_bytes"] for row in torchs),
        "remat_lowest_peak": search.lowest(),
    }
    return [*rows, summary]


COLUMNS: Sequence[str] = (
    "model planner asked kept_bytes peak_bytes flops ratio_geomean ratio_min ratio_max peaks "
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
            rows = compare(Search(name), options.budgets)
            writer.writerows(row | {"torch": torch.__version__} for row in rows)
            file.flush()
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
