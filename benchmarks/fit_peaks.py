"""Predicted and measured peaks of whole steps on this CPU, for every model of the suite.

    python -m benchmarks.fit_peaks [model ...]

Each step is planned without data: without remat, and at two lower peaks. It then runs with those plans,
and the bytes that it allocates are read from the profiler. There is a row for each in
`benchmarks/results/fit_peaks.csv`.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from benchmarks.common.models import SIZES, Around, named
from benchmarks.common.records import RESULTS
from remat import checkpoint_policy, remat
from remat._overrides import standing_for
from remat.cli.measure import trace_memory
from remat.plan import BUILT_IN_POLICIES, Plan, Portfolio, carried_out, cost_model, plans_by_budget, step_of

CSV = RESULTS / "fit_peaks.csv"
FIELDS = ("model", "share", "predicted", "measured", "error", "cost_s", "regions")
SHARES = (0.8, 0.6)


def rows(name: str) -> Iterator[dict[str, Any]]:
    """One row for each peak of a model."""
    problem = named(name).problem(torch.device("cpu"), torch.float32, 0)
    loss, leaves = problem.bind(Around(lambda fn: remat(fn, policy=checkpoint_policy(budget=1.0))))
    own = leaves(problem.params)
    step = step_of(loss, (own, problem.batch), {}, wanted=plans_by_budget)
    portfolio = Portfolio(step, cost_model("roofline", "cpu"), BUILT_IN_POLICIES)
    plain = portfolio.plain()
    for share in (1.0, *SHARES):
        chosen = plain if share == 1.0 else portfolio.within(int(share * plain.peak))
        if chosen is None:
            continue
        turns = zip(step.graphs, chosen.choices, step.names, strict=True)
        policies = [portfolio.carrier(*turn) for turn in turns]
        measured = peak_of(partial(loss, own, problem.batch), own, policies)
        error = chosen.peak / measured - 1
        facts = (name, share, chosen.peak, measured, f"{error:.4f}", f"{chosen.cost:.6g}", len(policies))
        yield dict(zip(FIELDS, facts, strict=True))


def peak_of(run: Callable[[], torch.Tensor], own: Any, policies: list[Any]) -> int:
    """The most that a step allocates whose regions, in the order of their calls, have these policies."""

    def step(mark: Callable[[], None]) -> None:
        turn = itertools.count()

        def stand(fn: Any, policy: Any, args: Any, kwargs: Any) -> tuple[Any]:
            chosen = policies[next(turn)]
            with standing_for(None):
                if chosen is None:
                    return (fn(*args, **kwargs),)
                chosen = carried_out([chosen]) if isinstance(chosen, Plan) else chosen
                return (remat(fn, policy=chosen)(*args, **kwargs),)

        with standing_for(stand):
            loss = run()
        mark()
        loss.backward()

    def clear() -> None:
        for leaf in pytree.tree_leaves(own):
            leaf.grad = None

    clear()
    step(lambda: None)
    clear()
    peak = trace_memory(step).peak
    clear()
    return peak


def tabulate(
    names: list[str], rows: Callable[[str], Iterator[dict[str, Any]]], fields: Sequence[str], path: Path
) -> None:
    """Print the rows of these models, or print and write those of all."""
    found = []
    for name in names or list(SIZES):
        try:
            for row in rows(name):
                print(*row.values(), sep="\t", flush=True)
                found.append(row)
        except Exception as error:  # of one model; the others have rows
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
    if not names:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)


if __name__ == "__main__":
    tabulate(sys.argv[1:], rows, FIELDS, CSV)
