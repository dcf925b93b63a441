"""The policy that a budget makes: it plans when it meets a region, and answers from the plan."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from remat._core.opinfo import Decision, OpInfo
from remat.plan.budget import check_budget, check_peak, resolve
from remat.plan.cache import forget, graph_of
from remat.plan.chain.stages import frontier
from remat.plan.graph.costs import CostModel, cost_model
from remat.plan.graph.graph import Graph
from remat.plan.model import meet
from remat.plan.peak import OutOfReach, highest_within, profile, step_peak
from remat.plan.plan import Plan
from remat.plan.solve.hull import bound, hull
from remat.plan.solve.portfolio import Solved, least, solve
from remat.plan.solve.problem import INF, Problem, Solution, complete
from remat.plan.torch_plans import candidates
from remat.policies import Policy, save_everything
from remat.policies._base import Numbered
from remat.transforms.closure.convert import as_operands
from remat.transforms.compat.aot import is_tracing
from remat.transforms.compat.functorch import in_transform
from remat.transforms.errors import RematError
from remat.transforms.ops import traits

# Torch's planner takes seconds to import and to run: not asked where it could not do better than this.
_PROVEN = 1e-3
# Torch is asked for plans that keep these shares; a peak may be met by one of them only.
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
# Stand among the numbers of ops for the one that comes next, and for the first that did not fit.
_NEXT, _OUTDATED = -1, -2


@dataclass(frozen=True, repr=False)
class BudgetPolicy(Numbered):
    """Keep at most so much, and recompute as little as can be for it.

    Attributes:
        budget: a share of what no remat would keep (float), bytes (int), or "free".
        cost: the cost model, or its name.
        device: what `cost="roofline"` or "measured" is meant for; None means this machine's accelerator.
        time_limit: seconds for the exact solver; the plan's gap says what was proven by then.
        peak: the most bytes that may be live at once in the region's forward and backward, by simulation
            (see `remat.plan.peak`), beside the budget; None means any. Of use in compiled code: in eager a
            region runs again as a whole before its backward, so that its own peak hardly depends on what it
            keeps; for the peak of many regions there are `plan_model` and `plan_chain`.
    """

    budget: float | int | str
    cost: str | CostModel = "roofline"
    device: Any = None
    time_limit: float = 1.0
    peak: int | None = None

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
            RematError: the function cannot be traced without data, or the budget is out of reach.
        """
        return self._plan(fn, args, kwargs)

    def _plan(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        return self._on(graph_of(fn, args, kwargs), fn)

    def _on(self, graph: Graph, fn: Callable[..., Any]) -> Plan:
        compiled = self.peak is not None and is_tracing()
        name = getattr(fn, "__name__", None) or type(fn).__name__
        return graph.solved.made(
            ("plan", self, compiled), lambda: plan_graph(graph, self, name, compiled=compiled)
        )

    def bind(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        """The plan for this call: a policy by op position."""
        args, kwargs = as_operands((args, kwargs))
        planned, plan = meet(fn, args, kwargs)
        if planned:
            return save_everything if plan is None else carried_out(plan)
        graph = graph_of(fn, args, kwargs)
        return carried_out(self._on(graph, fn), graph)

    def __call__(self, info: OpInfo) -> Decision:
        raise RematError(
            f"{self!r} decides for a whole region, not for {info.op} alone: pass it as "
            "remat(fn, policy=...), or ask for the plan with policy.plan(fn, *args)."
        )


@dataclass(frozen=True)
class Following(Policy):
    """A plan carried out among other ops, which are recomputed; those of the plan come in order.

    Forward-mode levels weave tangent ops between those of the plan; a step of a compiled scan takes its row
    out of a block of rows first. Views come and go; they are nobody's to keep. (Where a view was written to,
    autograd makes it anew of its base: by an op in the trace that was planned, without one in eager.)
    """

    plan: Plan
    # What it was made from, where that may be traced anew.
    graph: Graph | None = field(default=None, compare=False, repr=False)
    # The number of an op in the forward -> its position in the plan; `_NEXT` -> the position to be met next.
    places: dict[int, int] = field(default_factory=dict, compare=False, repr=False)
    counts = True

    @property
    def key(self) -> Hashable:  # type: ignore[override]
        # Made anew for every call; a plan is not.
        return type(self), self.plan.key

    def fresh(self) -> Policy:
        return type(self)(self.plan, self.graph)

    def __call__(self, info: OpInfo) -> Decision:
        # An op is asked about once more when its value has got a name.
        if info.index not in self.places:
            self.places[info.index] = self._place(info.op)
        return Decision.SAVE if self.places[info.index] in self.plan.chosen else Decision.RECOMPUTE

    def _place(self, op: Any) -> int:
        """The position in the plan of an op that was met now, -1 where it has none."""
        if traits(op).view:
            return -1
        position, ops = self.places.get(_NEXT, 0), self.plan.ops
        while position < len(ops) and _passed_over(ops[position]):
            position += 1
        met = position < len(ops) and ops[position] == str(op)
        self.places[_NEXT] = position + met
        return position if met else self._unplanned(position, op)

    def _unplanned(self, position: int, op: Any) -> int:
        """What is said of an op that is not the one planned next, which is at `position`."""
        return -1


@dataclass(frozen=True)
class Bound(Following):
    """A plan that was made for this very call: there is no other op."""

    def interleaved(self) -> Policy:
        return Following(self.plan, self.graph)

    def _unplanned(self, position: int, op: Any) -> int:
        if _OUTDATED in self.places:
            return -1
        planned = self.plan.ops[position] if position < len(self.plan.ops) else None
        difference = self.plan.difference(position, planned, str(op))
        if self.graph is None:
            raise RematError(difference)
        # Something changed that no key knows of. What is not planned is recomputed: right, if not the least.
        forget(self.graph)
        self.places[_OUTDATED] = position
        warnings.warn(f"{difference} (The next call is planned anew.)", stacklevel=2)
        return -1


def carried_out(plan: Plan, graph: Graph | None = None) -> Following:
    """The policy for the call that is about to run: where other ops may come in between, or where none do.

    With the `graph` of a plan that was not chosen by the user, ops that do not fit it lead to another one.
    """
    return (Following if in_transform() else Bound)(plan, graph)


@functools.lru_cache(maxsize=4096)
def _passed_over(name: str) -> bool:
    """Whether nothing is asked about an op: it is a view, or writes in place, whose result is never kept."""
    namespace, _, rest = name.partition(".")
    kind, _, overload = rest.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), kind, None), overload, None)
    if op is None:
        return kind.endswith("_")
    facts = traits(op)
    return facts.view or (bool(facts.writes) and facts.conditional is None)


def plan_graph(graph: Graph, policy: BudgetPolicy, region: str, *, compiled: bool = False) -> Plan:
    """Solve one graph under a policy's budget and prices; for a peak, that of a compiled backward or not."""
    model = cost_model(policy.cost, policy.device)
    problem = graph.problem(model, keep_heavy=policy.budget == "free")
    budget = resolve(policy.budget, graph, problem)

    def plan(solved: Solved, budget: int) -> Plan:
        peak = step_peak([profile(graph, solved.solution, compiled=compiled)])
        return Plan.of(graph, problem, solved, region=region, budget=budget, unit=model.unit, peak=peak)

    def at(budget: int) -> Plan:
        return plan(_solved(graph, problem, budget, policy.time_limit), budget)

    if policy.peak is None:
        return at(budget)
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
    """Plans that the search by bytes may miss, with their peaks: mixtures, and torch's own. Once a graph."""

    def found() -> list[tuple[int, str, Solution]]:
        tried = [("mixture", solution) for solution in frontier(problem)]
        for share in _SHARES:
            for name, saved in candidates(graph, int(share * graph.kept_by_default), shares=(1.0,)):
                solution = complete(problem, saved)
                tried += [(name, solution)] if solution is not None else []
        distinct = {solution.saved: (name, solution) for name, solution in reversed(tried)}
        return [
            (step_peak([profile(graph, solution, compiled=compiled)]), name, solution)
            for name, solution in distinct.values()
        ]

    return graph.solved.made(("rivals", policy.cost, policy.device, policy.budget == "free", compiled), found)


def _solved(graph: Graph, problem: Problem, budget: int, time_limit: float) -> Solved:
    """Our best plan; where it is not proven to be within a thousandth, torch's plans compete too."""
    solved = solve(problem, budget, time_limit=time_limit)
    if solved.gap <= _PROVEN:
        return solved
    again = solve(problem, budget, exact=False, candidates=candidates(graph, budget))
    if again.solution.cost >= solved.solution.cost:
        return solved
    return Solved(again.solution, solved.lower_bound, again.solver, solved.seconds + again.seconds)


def budget_policy(
    budget: float | int | str | None = None,
    cost: str | CostModel = "roofline",
    device: Any = None,
    peak: int | str | None = None,
) -> BudgetPolicy:
    """What `checkpoint_policy(budget=...)` and `checkpoint_policy(peak=...)` return."""
    return BudgetPolicy(
        1.0 if budget is None else budget, cost, device, peak=check_peak(peak) if peak is not None else None
    )
