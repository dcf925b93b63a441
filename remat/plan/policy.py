"""The policy that a budget makes: it plans when it meets a region, and answers from the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from remat._core import Decision, OpInfo, Telling, did, name_of
from remat._region import name_of_region
from remat.plan.budget import check_budget, check_peak, resolve
from remat.plan.calls import Trust, graph_of, paths_of, trust_in
from remat.plan.chain import frontier
from remat.plan.compared import compiler_keeps_no_more, ready
from remat.plan.graph import CostModel, Graph, cost_model
from remat.plan.joint import planned_for
from remat.plan.peak import OutOfReach, highest_within, profile, step_peak
from remat.plan.plans import Plan, carried_out, meet, met
from remat.plan.solve import (
    INF,
    Problem,
    Solution,
    Solved,
    bound,
    complete,
    hull,
    in_doubt,
    least,
    solve,
    tell_greedy,
)
from remat.policies import Numbered, Policy, save_everything
from remat.transforms import RematError
from remat.transforms.closure import as_operands
from remat.transforms.compat import in_transform, is_tracing
from remat.transforms.entry import under_hooks


@dataclass(frozen=True, repr=False)
class BudgetPolicy(Numbered):
    """Keeps at most `budget`, and recomputes as little as possible. `checkpoint_policy(budget=...)` makes
    one.

    Attributes:
        budget: a share of what no remat would keep (float), bytes (int), or "free".
        cost: the cost model, or its name.
        device: what `cost="roofline"` or "measured" is meant for; None means the device of the region's
            tensors, and an h100 where these have no data.
        time_limit: seconds for the exact solver; the plan's gap says what was proven by then.
        peak: the most bytes that may be live at once in the region's forward and backward, by simulation. It
            is a limit beside the budget, and None means no limit. It helps in compiled code. In eager a
            region runs again as a whole, so its own peak hardly depends on what it keeps. For the peak of
            many regions use `remat.fit`.

    Example:
        >>> import torch
        >>> from remat import checkpoint_policy
        >>> policy = checkpoint_policy(budget=0.5, cost="flops")
        >>> plan = policy.plan(lambda x: (x @ x).tanh() @ x, torch.ones(8, 8, requires_grad=True))
        >>> plan.kept_bytes, plan.default_bytes, plan.recomputed_flops
        (256, 512, 1024.0)
    """

    budget: float | int | str
    cost: str | CostModel = "roofline"
    device: Any = None
    time_limit: float = 1.0
    peak: int | None = None
    plans_by_budget: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", check_budget(self.budget))
        if self.peak is not None:
            object.__setattr__(self, "peak", check_peak(self.peak))
        cost_model(self.cost, self.device)
        super().__post_init__()

    def __repr__(self) -> str:
        shown = {"budget": self.budget, "peak": self.peak, "cost": self.cost, "device": self.device}
        usual = {"peak": None, "cost": "roofline", "device": None}
        if self.peak is not None:
            usual["budget"] = 1.0
        options = [f"{k}={v!r}" for k, v in shown.items() if k not in usual or v != usual[k]]
        return f"checkpoint_policy({', '.join(options)})"

    def plan(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
        """The plan for the region `fn(*args, **kwargs)`.

        Raises:
            RematError: the function cannot be traced without data, nothing in it is differentiated, or the
                budget is out of reach.
        """
        with planned_for(self.device), Telling(lambda: name_of_region(fn)):
            graph = graph_of(fn, args, kwargs)
            graph.check_differentiated(name_of_region(fn))
            return self._plan(graph, fn)

    def _plan(self, graph: Graph, fn: Callable[..., Any]) -> Plan:
        compiled = is_tracing()
        name = name_of(fn)

        def made() -> Plan:
            plan = plan_graph(graph, self, name, compiled=compiled)
            tell_greedy(name, plan.gap)
            return plan

        return graph.solved.made(("plan", self, compiled), made)

    def bind(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        """The plan for this call: a policy by op position."""
        args, kwargs = as_operands((args, kwargs))
        planned, plan = meet(fn, args, kwargs)
        if planned:
            return save_everything if plan is None else plan.followed()
        with planned_for(self.device), Telling(lambda: name_of_region(fn)):
            paths = paths_of(fn, args, kwargs)
            paths.trust = None
            how = self.key, is_tracing(), in_transform()
            found = paths.followed.get(how)
            if found is None:
                plans = [self._plan(graph, fn) for graph in paths.graphs]
                found = carried_out(plans, paths)
                if self.peak is None and is_tracing():
                    found = replace(found, needless=_needless(paths.graphs, plans))
                paths.followed[how] = found
        return found

    def trust(self, anchor: Any) -> Trust | None:
        """What knows of earlier calls, but where a plan of the whole model is being made or carried out, or
        where every call must keep the same, whatever others were surprised by."""
        return None if met() or under_hooks() else trust_in(anchor)

    def __call__(self, info: OpInfo) -> Decision:
        raise RematError(
            f"{self!r} decides for a whole region, not for {info.op} alone: pass it as "
            "remat(fn, policy=...), or ask for the plan with policy.plan(fn, *args)."
        )


def _needless(graphs: Sequence[Graph], plans: Sequence[Plan]) -> bool:
    """Whether a compiler that is left to itself keeps no more than any of these plans."""
    for graph, plan in zip(graphs, plans, strict=True):
        values = sum(kept.bytes for kept in plan.kept if kept.position >= 0)
        if plan.sent or not compiler_keeps_no_more(graph, values, plan.kept_bytes - values):
            return False
    return bool(plans)


def _settled(graph: Graph, problem: Problem, budget: int, solved: Solved, model: CostModel) -> Solved:
    """A ready policy's plan, where prices do not tell the one that was found from it."""
    accuracy = getattr(model, "accuracy", 0.0)
    if not accuracy:
        return solved
    fitting = [(name, s) for name, s in _ready_made(graph, problem) if s.bytes <= budget]
    return in_doubt(solved, problem, accuracy, fitting)


def _ready_made(graph: Graph, problem: Problem) -> list[tuple[str, Solution]]:
    """What ready policies make of a problem, by their names."""
    kept = ((name, complete(problem, saved)) for name, saved in ready(graph, problem))
    return [(name, solution) for name, solution in kept if solution is not None]


def plan_graph(graph: Graph, policy: BudgetPolicy, region: str, *, compiled: bool = False) -> Plan:
    """Solve one graph under a policy's budget, with the prices and the peak of a compiled step or not."""
    model = cost_model(policy.cost, policy.device, compiled=compiled)
    problem = graph.problem(model, keep_heavy=policy.budget == "free")
    did("priced", len(graph.ops))
    budget = resolve(policy.budget, graph.kept_by_default, problem)

    def plan(solved: Solved, budget: int) -> Plan:
        peak = step_peak([profile(graph, solved.solution, compiled=compiled)])
        return Plan.of(graph, problem, solved, region=region, budget=budget, unit=model.unit, peak=peak)

    def solved(budget: int) -> Solved:
        return solve(problem, budget, time_limit=policy.time_limit, candidates=ready(graph, problem))

    def at(budget: int) -> Plan:
        return plan(solved(budget), budget)

    if policy.peak is None:
        return plan(_settled(graph, problem, budget, solved(budget), model), budget)
    found, lowest = [], INF
    try:
        low = min(least(problem).bytes, budget)
        found.append(highest_within(policy.peak, low, budget, at, lambda plan: plan.peak_bytes))
    except OutOfReach as error:
        lowest = error.lowest
    if not found or found[0].cost > 0:
        rivals = [rival for rival in _rivals(graph, policy, problem, compiled) if rival[2].bytes <= budget]
        fitting = [(name, solution) for peak, name, solution in rivals if peak <= policy.peak]
        lowest = min([lowest, *(peak for peak, _, _ in rivals)])
        if fitting:
            name, solution = min(fitting, key=lambda pair: pair[1].cost)
            floor = min(bound(hull(problem, around=solution.bytes), solution.bytes), solution.cost)
            found.append(plan(Solved(solution, floor, name, 0.0), solution.bytes))
    if not found:
        raise OutOfReach(policy.peak, int(lowest))
    return min(found, key=lambda plan: plan.cost)


def _rivals(
    graph: Graph, policy: BudgetPolicy, problem: Problem, compiled: bool
) -> list[tuple[int, str, Solution]]:
    """Plans that the search by bytes may miss, with their peaks: mixtures, ready policies'. Once a graph."""

    def found() -> list[tuple[int, str, Solution]]:
        tried = [("mixture", solution) for solution in frontier(problem)]
        tried += _ready_made(graph, problem)
        distinct = {solution.saved: (name, solution) for name, solution in reversed(tried)}
        return [
            (step_peak([profile(graph, solution, compiled=compiled)]), name, solution)
            for name, solution in distinct.values()
        ]

    return graph.solved.made(("rivals", policy.cost, policy.device, policy.budget == "free", compiled), found)
