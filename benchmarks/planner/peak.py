"""Recomputed FLOPs at equal simulated peak: our plans against torch's `activation_memory_budget`.

    python -m benchmarks.planner.peak --out benchmarks/results/planner_peak.csv

The backward is a compiled one, laid out as torch does (`reordering_to_mimic_autograd_engine`): what runs
again does so right before its first reader. Live bytes are counted storage by storage, no fusion; a saved
storage goes after its last reader; parameters, the model's input, its result and the result's gradient live
outside. With `gradients` "held" parameters' gradients stay once made; with "added" they are added to buffers
that live before, as where gradients are accumulated, and go.

Torch is asked at evenly spaced budgets. At every peak that it reaches, its best plan within that peak is
compared with the best of ours: that of `plan_chain` over attention and MLP halves, that of
`highest_within`, the search behind `checkpoint_policy(peak=...)`, over the whole model as one region, and
torch's own plan where neither is better, as in that policy. `bound_flops` is what no schedule within that
peak can recompute less than (`planner_bound.py`), and `bound_ratio` torch's FLOPs over that. The last row
has the geometric means of both ratios, and the lowest peaks; `eager` is for the eager engine, which
recomputes a whole region before its backward.
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

from benchmarks.common.records import RESULTS
from benchmarks.planner.bound import Bound
from benchmarks.planner.compiled import compiled_problem
from benchmarks.planner.models import MODELS, built, gpt, joint, llama
from remat.plan import Flops
from remat.plan.chain import best_parts
from remat.plan.chain_plan import Task, trace
from remat.plan.compared import torch_plan
from remat.plan.graph.costs import flops_of
from remat.plan.peak import compiled_order, highest_within, live_bytes
from remat.plan.solve import Solution, complete, hull, solve
from remat.transforms import RematError

MODELS |= {"GPT 16": lambda: gpt(16), "Llama 16 x 4": lambda: llama(16, batch=4)}


class Search:
    """Both planners on one model."""

    def __init__(self, name: str) -> None:
        self.name, self.graph = name, joint(name)
        self.compiled = compiled_problem(self.graph, Flops())
        corners = hull(self.compiled.problem)
        self.low, self.high = corners[0].bytes, corners[-1].bytes
        self.solved = functools.cache(self._solved)
        self.model, (self.x,), self.shared = built(name)
        self.stages = [f for block in self.model.blocks for f in (block.attend, block.feed)]  # type: ignore
        self.traced = trace(self.stages, self.x, tuple(self.shared))

    def theirs(self, count: int) -> Iterator[tuple[float, Solution]]:
        """Torch's plans at evenly spaced budgets."""
        for k in range(count + 1):
            saved = self.compiled.saved(set(torch_plan(self.graph, k / count).values))
            found = complete(self.compiled.problem, saved)
            if found is not None:
                yield round(k / count, 4), found

    def _solved(self, budget: int) -> Solution:
        return solve(self.compiled.problem, budget, time_limit=0.5).solution

    def chain(self, **options: bool) -> Task:
        """The same model as a chain of halves."""
        return Task(self.stages, self.traced, Flops(), **options)


class Peaks:
    """Peaks with parameters' gradients held, or added to what is there."""

    def __init__(self, search: Search, held: bool) -> None:
        self.search, self.graph, self.held = search, search.graph, held
        values = self.graph.values
        pairs = zip(self.graph.gradients, self.graph.differentiated, strict=True)
        self.forever = {values[g].storage for g, v in pairs if held or values[v].origin != "parameter"}
        self.chains = {c: search.chain(compiled=c, accumulating=not held).chain for c in (True, False)}
        self.x = self.chains[True].stages[0].input
        self.bound = Bound(self.graph, self.forever)
        self.ours = functools.cache(lambda budget: self.row("remat region", budget, search.solved(budget)))

    def row(self, planner: str, asked: float, found: Solution) -> dict[str, Any]:
        """A plan of the whole model as one region: FLOPs run again, most bytes live in the backward."""
        graph, late = self.graph, self.search.compiled.late
        ops = compiled_order(graph, found.saved, late)
        kept = {graph.values[v].storage for v in found.saved if graph.values[v].producer >= 0}
        peak = live_bytes(graph, ops, start=kept, forever=self.forever)
        flops = sum(flops_of(graph, op) for op in ops if op.forward)
        return self.line(planner, asked, found.bytes, peak, flops)

    def line(self, planner: str, asked: float, kept: int, peak: int, flops: float) -> dict[str, Any]:
        gradients = "held" if self.held else "added"
        return {
            "model": self.search.name,
            "gradients": gradients,
            "planner": planner,
            "asked": asked,
            "kept_bytes": kept,
            "peak_bytes": peak,
            "flops": flops,
        }

    def chained(self, limit: int, compiled: bool = True) -> dict[str, Any] | None:
        """The plan of `plan_chain` within a peak."""
        # To a chain its input counts.
        chain = self.chains[compiled]
        parts = best_parts(chain, limit + self.x)
        if parts is None:
            return None
        kept, peak = sum(map(chain.kept, parts)), chain.peak(parts) - self.x
        return self.line(f"remat chain{'' if compiled else ', eager'}", limit, kept, peak, chain.flops(parts))

    def within(self, limit: int, torchs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The best of the portfolio within a peak; the first of those that are equal."""
        found = [self.chained(limit)]
        try:
            found.append(highest_within(limit, self.search.low, self.search.high, self.ours, _peak))
        except RematError:
            pass
        found += [row for row in torchs if row["peak_bytes"] <= limit]
        best = min((row for row in found if row is not None), key=lambda row: row["flops"])
        return best | {"asked": limit, "bound_flops": self.bound.flops(limit)}


def _peak(row: dict[str, Any]) -> int:
    return row["peak_bytes"]


def compare(peaks: Peaks, plans: Sequence[tuple[float, Solution]]) -> list[dict[str, Any]]:
    """All plans, and the summary."""
    torchs = [peaks.row("torch dp", asked, found) for asked, found in plans]
    rows, free = list(torchs), 0
    for limit in sorted({row["peak_bytes"] for row in torchs}):
        theirs = min(row["flops"] for row in torchs if row["peak_bytes"] <= limit)
        ours = peaks.within(limit, torchs)
        if theirs and ours["flops"]:
            ours["ratio"] = round(theirs / ours["flops"], 4)
            ours["bound_ratio"] = round(theirs / ours["bound_flops"], 4) if ours["bound_flops"] else math.inf
        else:
            free += bool(theirs)
        rows.append(ours)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    lowest = {c: chain.lowest() - peaks.x for c, chain in peaks.chains.items()}
    rows += [row for row in (peaks.chained(lowest[True]), peaks.chained(lowest[False], False)) if row]
    summary = {
        "model": peaks.search.name,
        "gradients": "held" if peaks.held else "added",
        "planner": "ratio",
        "ratio": _mean(ratios),
        "bound_ratio": _mean([row["bound_ratio"] for row in rows if "bound_ratio" in row]),
        "ratio_min": min(ratios, default=""),
        "ratio_max": max(ratios, default=""),
        "peaks": len(ratios),
        "peaks_where_ours_runs_nothing_again": free,
        "torch_lowest_peak": min(map(_peak, torchs)),
        "remat_lowest_peak": lowest[True],
        "remat_lowest_peak_eager": lowest[False],
        "bound_lowest_peak": peaks.bound.lowest,
    }
    return [*rows, summary]


def _mean(ratios: Sequence[float]) -> Any:
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4) if ratios else ""


COLUMNS: Sequence[str] = (
    "model gradients planner asked kept_bytes peak_bytes flops bound_flops ratio bound_ratio ratio_min "
    "ratio_max peaks peaks_where_ours_runs_nothing_again torch_lowest_peak remat_lowest_peak "
    "remat_lowest_peak_eager bound_lowest_peak torch"
).split()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "planner_peak.csv")
    names = ["GPT 16", "Llama 16", "Llama 16 x 4"]
    parser.add_argument("--models", nargs="*", default=names, choices=list(MODELS))
    parser.add_argument("--budgets", type=int, default=40)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for name in options.models:
            search = Search(name)
            plans = list(search.theirs(options.budgets))
            for held in (True, False):
                rows = compare(Peaks(search, held), plans)
                writer.writerows(row | {"torch": torch.__version__} for row in rows)
                file.flush()
                print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
