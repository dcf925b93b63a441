"""The one search (HiGHS after the reduction) beside the five that it stands for, on every problem of `gaps`.

    python -m benchmarks.planner.search

`results/planner.csv` of 25 November 2026 has the prices of the plans that the former searches found, torch's
plans offered to them. They are found anew, nothing offered, and without SciPy. A row of
`results/planner_search.csv` for each problem: prices then, now and greedily, their differences as shares of a
step (three forwards), the cheapest ready policy that fits, and the proven gap.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common.records import RESULTS
from benchmarks.planner.compiled import compiled_problem
from benchmarks.planner.gaps import COSTS
from benchmarks.planner.models import MODELS, joint
from remat.plan.compared import ready
from remat.plan.graph import Graph
from remat.plan.solve import INF, complete, solve

COLUMNS: Sequence[str] = (
    "model cost code asked_bytes then now greedy now_share greedy_share ready gap".split()
)


def rows(name: str, former: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """All problems of one model, in eager and in compiled code."""
    graph = Graph(joint(name))
    for cost, model in COSTS.items():
        problems = {"eager": graph.problem(model), "compiled": compiled_problem(graph.joint, model).problem}
        step = {code: 3 * sum(c for c in p.cost if c < INF) for code, p in problems.items()}
        seen: dict[tuple[str, int], float] = {}
        for row in former:
            if row["model"] == name and row["cost"] == cost:
                code = "eager" if row["planner"] == "remat" else "compiled"
                seen[code, int(row["asked_bytes"])] = float(row["ours_cost"])
        for (code, asked), then in sorted(seen.items()):
            problem = problems[code]
            now, greedy = solve(problem, asked), solve(problem, asked, exact=False)
            others = ready(graph, problem) if code == "eager" else []
            kept = [complete(problem, saved) for _, saved in others]
            fitting = [s.cost for s in kept if s is not None and s.bytes <= asked]
            shares = [(s.solution.cost - then) / step[code] for s in (now, greedy)]
            prices = then, now.solution.cost, greedy.solution.cost, *(f"{share:.6f}" for share in shares)
            facts = name, cost, code, asked, *prices, min(fitting, default=""), f"{now.gap:.2e}"
            yield dict(zip(COLUMNS, facts, strict=True))


def main() -> None:
    """Write all rows, and print the largest differences."""
    with (RESULTS / "planner.csv").open() as file:
        former = list(csv.DictReader(file))
    found: list[dict[str, Any]] = []
    for name in MODELS:
        found += rows(name, former)
        print(name, len(found), flush=True)
    with (RESULTS / "planner_search.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    for share in ("now_share", "greedy_share"):
        print(f"{share}: at most {max(float(row[share]) for row in found):.4%} of a step more than then")
    beaten = sum(row["ready"] != "" and row["ready"] < row["now"] * (1 - 1e-9) for row in found)
    print(f"{len(found)} problems; a ready policy is cheaper on {beaten}")


if __name__ == "__main__":
    main()
