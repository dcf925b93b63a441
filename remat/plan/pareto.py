"""The whole trade between bytes and recomputation: plans, the bound below them, what others choose."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from remat._blocks import regions
from remat._core import (
    Page,
    Series,
    Spot,
    Table,
    as_text,
    chart,
    format_bytes,
    joined_keywords,
    keywords_apart,
)
from remat._region import name_of_region
from remat.plan.calls import looked
from remat.plan.compared import BUILT_IN_POLICIES, SOLVERS, beaten_by, measured, ready, torch_plan
from remat.plan.graph import CostModel, Graph, cost_model
from remat.plan.joint import record
from remat.plan.plans import Plan
from remat.plan.solve import Problem, Solution, bound, complete, gap_of, hull, solve
from remat.policies import Policy
from remat.transforms import RematError


@dataclass(frozen=True)
class Point:
    """One plan on the chart.

    Attributes:
        planner: "remat", "bound" (a corner of the proven bound), the name of a policy, or "torch dp" etc.
        budget: the share asked for, None where the plan has none.
        kept_bytes: bytes kept.
        share: of what is kept without a plan.
        recomputed_flops: FLOPs run again.
        replay_share: those as a share of forward and backward.
        cost: modelled price.
        gap: proven distance from the optimum at these bytes; for others than "remat", from the bound.
        seconds: of a forward and backward under it, where `measure=True`; None where it was not run.
        refuted: which planner took 2 % less time with no more bytes kept; empty where none did.
    """

    planner: str
    budget: float | None
    kept_bytes: int
    share: float
    recomputed_flops: float
    replay_share: float
    cost: float
    gap: float
    seconds: float | None = None
    refuted: str = ""


@dataclass(frozen=True)
class Frontier:
    """The plans of a region over all budgets, with the proven bound and other planners beside them.

    Attributes:
        name: of the region.
        unit: of prices, "FLOP" or "s".
        default_bytes: bytes that the function keeps without a plan; regions that it has already stay.
        points: one for each plan; `of(planner)` gives those of one planner.

    Example:
        >>> import torch
        >>> from remat import pareto
        >>> x = torch.ones(8, 8, requires_grad=True)
        >>> frontier = pareto(lambda x: (x @ x).tanh() @ x, x, torch_solvers=())
        >>> [point.kept_bytes for point in frontier.of("save_matmuls")]
        [512]
    """

    name: str
    unit: str
    default_bytes: int
    points: tuple[Point, ...]

    def of(self, planner: str) -> tuple[Point, ...]:
        """The points of one planner, by bytes."""
        return tuple(sorted((p for p in self.points if p.planner == planner), key=lambda p: p.kept_bytes))

    def to_csv(self, path: str | Path | None = None) -> str:
        """All points as CSV text, written to `path` where one is given."""
        buffer = io.StringIO()
        names = [f.name for f in fields(Point)]
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow([*names, "unit"])
        writer.writerows([*(getattr(p, n) for n in names), self.unit] for p in self.points)
        if path is not None:
            Path(path).write_text(buffer.getvalue())
        return buffer.getvalue()

    def plot(self, path: str | Path) -> None:
        """Write the points and the bound as an SVG."""
        planners = list(dict.fromkeys(p.planner for p in self.points))

        def series(number: int, planner: str) -> Series:
            spots = [Spot(p.kept_bytes / 2**20, p.cost) for p in self.of(planner)]
            line = planner in ("remat", "bound")
            # A line is named at its cheapest end, a point beside it.
            spots = [replace(spot, label="" if line and i else planner) for i, spot in enumerate(spots)]
            colour = {"remat": 0, "bound": 4}.get(planner, 1 + number % 3)
            return Series(spots, colour, line, planner != "bound", planner == "bound")

        drawn = list(map(series, range(len(planners)), planners))
        Path(path).write_text(chart(self.name, "kept, MiB", f"recomputed, {self.unit}", drawn))

    def __str__(self) -> str:
        head = f"{self.name}: {format_bytes(self.default_bytes)} kept without a plan; cost in {self.unit}"
        columns = ("planner", ">kept", ">share", ">replay", ">cost", ">gap")
        timed = any(p.seconds is not None for p in self.points)
        # What comes out alike is one row.
        rows: dict[tuple[str, ...], list[str]] = {}
        for p in sorted(self.points, key=lambda p: (p.kept_bytes, -p.cost)):
            cost = f"{p.share:.1%}", f"{p.replay_share:.2%}", f"{p.cost:.4g}", f"{p.gap:.2%}"
            ran = ("" if p.seconds is None else f"{1e3 * p.seconds:.2f}", p.refuted) if timed else ()
            rows.setdefault((format_bytes(p.kept_bytes), *cost, *ran), []).append(p.planner)
        named = [(", ".join(dict.fromkeys(planners)), *cells) for cells, planners in rows.items()]
        table = Table(head, (*columns, *((">ms", "beaten by") if timed else ())), tuple(named))
        return as_text(Page((), (table,)), len(named))


@keywords_apart
def pareto(
    fn: Callable[..., Any],
    /,
    *args: Any,
    cost: str | CostModel = "flops",
    device: Any = None,
    points: int = 10,
    torch_solvers: tuple[str, ...] = SOLVERS,
    measure: bool | int = False,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Frontier:
    """Plans of a region over all budgets, with the lower bound, the built-in policies, and torch's own plans.

    Args:
        fn: the region; traced on fake tensors, nothing is computed without `measure`.
        args, keywords: its arguments.
        cost, device: as for `BudgetPolicy`.
        points: number of budgets, evenly spaced from the least bytes to those kept without a plan.
        torch_solvers: which of torch's solvers to ask; torch plans functional graphs only.
        measure: run forward and backward under every plan and every built-in policy, in turns, and mark the
            points that another one refutes. An int is the number of turns; True means 10. The function's
            state and gradients are put back.
        kwargs: keywords of `fn` that are named like options here: `kwargs={"device": "cpu"}`. An option
            that `fn` also takes is refused where there is no `kwargs`, as it may be meant for either.

    Raises:
        RematError: the function cannot be traced without data, or is to be measured without; nothing in it is
            differentiated, or all that it keeps is kept by regions that it has already.

    Example:
        >>> import torch
        >>> from remat.plan import pareto
        >>> frontier = pareto(lambda x: (x @ x).tanh() @ x, torch.ones(8, 8, requires_grad=True), points=3)
        >>> [p.kept_bytes for p in frontier.of("remat")]
        [256, 256, 512]
    """
    model, given = cost_model(cost, device), joined_keywords(keywords, kwargs)
    graph = looked(lambda _: Graph(record(fn, args, given)), fn, args, given)
    name = name_of_region(fn)
    graph.check_differentiated(name)
    if not graph.kept_by_default and isinstance(fn, torch.nn.Module) and (names := regions(fn)):
        raise RematError(
            f"Nothing to plan in {name}: {len(names)} of its modules are regions already ({names[0]}, ...), "
            "and nothing else in it is kept. Write remat.remove(model) before pareto, or "
            "remat.fit(model, ..., peak=...), which plans blocks anew."
        )
    problem = graph.problem(model)
    corners = hull(problem)
    if not corners:
        raise RematError(
            "Nothing to plan: the backward of this function reads something that cannot be had again."
        )
    chart = _Chart(graph, problem, corners)
    low, high = corners[0].bytes, max(graph.kept_by_default, corners[0].bytes)
    shares = [k / max(points - 1, 1) for k in range(points)]
    for budget in (low + int((high - low) * share) for share in shares):
        solved = solve(problem, budget, candidates=ready(graph, problem))
        plan = Plan.of(graph, problem, solved, region=name, budget=budget, unit=model.unit)
        chart.add("remat", solved.solution, budget / max(high, 1), solved.gap, plan)
    for corner in corners:
        chart.add("bound", corner, None, 0.0)
    for policy, saved in ready(graph, problem):
        chart.add(policy, complete(problem, saved), None, policy=BUILT_IN_POLICIES[policy])
    if not any(op.mutates for op in graph.joint.ops):
        chart.add_torch(torch_solvers, shares)
    if measure:
        chart.measure(fn, args, given, 10 if measure is True else int(measure))
    return Frontier(name, model.unit, graph.kept_by_default, tuple(chart.points))


class _Chart:
    """Collects points, each measured against the same graph and bound."""

    def __init__(self, graph: Graph, problem: Problem, corners: list[Solution]) -> None:
        self.graph, self.problem, self.corners = graph, problem, corners
        self.points: list[Point] = []
        # What carries a point out, by its place; the bound is nothing that runs, torch's plans run compiled.
        self.policies: dict[int, Policy] = {}

    def add(
        self,
        planner: str,
        solution: Solution | None,
        budget: float | None,
        gap: float | None = None,
        policy: Policy | None = None,
    ) -> None:
        if solution is None:
            return
        flops = sum(self.graph.flops[op] for op in solution.replayed)
        if gap is None:
            gap = gap_of(solution.cost, bound(self.corners, solution.bytes))
        share = solution.bytes / max(self.graph.kept_by_default, 1)
        replay = flops / self.graph.step_flops if self.graph.step_flops else 0.0
        if policy is not None:
            self.policies[len(self.points)] = policy
        self.points.append(Point(planner, budget, solution.bytes, share, flops, replay, solution.cost, gap))

    def add_torch(self, solvers: Sequence[str], shares: Sequence[float]) -> None:
        """The plans of torch's solvers."""
        joint = self.graph.joint
        for solver, share in itertools.product(solvers, shares):
            plan = torch_plan(joint, share, solver)
            bases = {joint.family[joint.values[v].storage][0] for v in plan.values}
            self.add(f"torch {solver}", complete(self.problem, self.graph.places(bases)), share)

    def measure(self, fn: Callable[..., Any], args: Any, kwargs: Any, rounds: int) -> None:
        """Run what can be run, plans of the same verdicts once, and mark what others refute."""
        distinct = {policy.key: policy for policy in self.policies.values()}
        times = measured(fn, args, kwargs, [*distinct.values()], rounds)
        of = dict(zip(distinct, times, strict=True))
        found = {at: (self.points[at], of[policy.key]) for at, policy in self.policies.items()}
        rivals = [(point.planner, point.kept_bytes, seconds) for point, seconds in found.values()]
        for at, (point, seconds) in found.items():
            beaten = beaten_by(point.kept_bytes, seconds, rivals)
            self.points[at] = replace(point, seconds=seconds, refuted=beaten)
