"""One budget for all regions of a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from remat._core import joined_keywords, keywords_apart
from remat.plan.budget import check_budget, check_link, check_peak, resolve
from remat.plan.calls import Regions, graph_of, looking
from remat.plan.chain import Chain, Measure, Stage, best_parts
from remat.plan.graph import CostModel, Graph, cost_model
from remat.plan.joined import OverLink, over_link
from remat.plan.joint import NotOnFakes, on_fakes, planned_for
from remat.plan.peak import OutOfReach, Profile, highest_within, profile, step_peak
from remat.plan.plans import ModelPlan, Plan, handling
from remat.plan.solve import (
    INF,
    Placed,
    Problem,
    Solution,
    Solved,
    bound,
    complete,
    hull,
    least,
    solve,
    tell_greedy,
)
from remat.policies import Policy
from remat.transforms import RematError
from remat.transforms.entry import under_hooks


@keywords_apart
def plan_regions(
    fn: Callable[..., Any],
    /,
    *args: Any,
    budget: float | int | str | None = None,
    peak: int | str | None = None,
    cost: str | CostModel = "roofline",
    device: Any = None,
    link: str | float | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> ModelPlan:
    """Split one budget over all regions that `fn(*args, **keywords)` calls; `remat.fit` has the words.

    `fn` runs once on fake tensors to find them. All regions are solved as one problem, so bytes go where they
    spare most. What `fn` keeps outside of its regions is not counted.

    Raises:
        RematError: no region is met, or the budget is out of reach (the message gives the least).
    """
    given = joined_keywords(keywords, kwargs)
    with planned_for(device):
        graphs = _regions(fn, args, given)
    if not graphs:
        raise RematError(
            "remat.fit found no region to plan: wrap the blocks of the model as "
            "remat(block, policy=checkpoint_policy(budget=0.5)); their budgets give way to the common one. "
            "Under saved-tensor hooks, such as torch's checkpoint has, regions keep their own."
        )
    if not any(graph.joint.gradients for _, graph in graphs):
        graphs[0][1].check_differentiated(graphs[0][0])
    if (budget is None) == (peak is None):
        raise RematError(
            'remat.fit takes budget=... or peak=..., one of them: write budget=0.4 or peak="20GiB".'
        )
    task = _Task(fn, graphs, cost_model(cost, device), budget == "free")
    if peak is not None:
        if link is not None:
            raise RematError("remat.fit(link=...) goes with a budget: write budget=..., not peak=....")
        return task.within_peak(check_peak(peak))
    if link is not None:
        return task.over_link(task.bytes_of(budget), check_link(link))
    return task.plan(task.bytes_of(budget))


def pieces_within(graphs: Sequence[Graph], model: CostModel, budget: Any) -> tuple[int, list[Solution]]:
    """Bytes of a budget that regions share, and the cheapest that each may keep of it."""
    task = _Task(None, [("", graph) for graph in graphs], model, budget == "free")
    limit = task.bytes_of(budget)
    return limit, split(task.parts, solve(task.whole, limit, time_limit=_SECONDS).solution)


# The search stops there where nothing is proven; the gap then says so.
_SECONDS = 2.0


class _Task:
    """The regions of a model as one problem."""

    def __init__(
        self,
        fn: Any,
        graphs: list[tuple[str, Graph]],
        model: CostModel,
        free: bool,
    ) -> None:
        self.fn, self.graphs, self.model = fn, graphs, model
        # Graphs that are one graph have one problem: it is made, and solved, once.
        distinct = {id(graph): graph for _, graph in graphs}
        made = {key: graph.problem(model, keep_heavy=free) for key, graph in distinct.items()}
        self.parts = [made[id(graph)] for _, graph in graphs]
        self.whole = union(self.parts)
        self.default = sum(graph.kept_by_default for _, graph in graphs)

    def bytes_of(self, budget: Any) -> int:
        """A budget as the user wrote it, in bytes of all regions together."""
        return resolve(check_budget(budget), self.default, self.whole, "these regions")

    def plan(self, budget: int) -> ModelPlan:
        """The cheapest plan that keeps at most `budget` bytes."""
        solved = solve(self.whole, budget, time_limit=_SECONDS)
        tell_greedy("these regions", solved.gap)
        return self._model_plan(solved, budget)

    def over_link(self, budget: int, speed: float) -> ModelPlan:
        """The same where values may also go to the host."""
        if self.model.unit != "s":
            raise RematError(
                f'A link needs prices in seconds, not in {self.model.unit}: write cost="roofline".'
            )
        graphs = [graph for _, graph in self.graphs]
        found = over_link(graphs, self.parts, budget, speed)
        if found is None or found.joined.cost > found.alone:
            # Nothing proves that the host helps: the plan without it may be as good.
            without = self.plan(budget) if least(self.whole).bytes <= budget else None
            if found is None or (without is not None and without.cost <= found.joined.cost):
                return without or self.plan(budget)
        joined, regions, profiles = found.joined, [], []
        made: dict[tuple[int, int], tuple[Plan, Profile]] = {}
        for (name, graph), part, placed in zip(self.graphs, self.parts, joined.regions, strict=True):
            key = id(graph), id(placed)
            if key not in made:
                made[key] = self._placed(graph, part, placed, found)
            plan, live = made[key]
            regions.append(replace(plan, region=name))
            profiles.append(live)
        return ModelPlan(
            fn=self.fn,
            regions=tuple(regions),
            budget=budget,
            kept_bytes=sum(plan.kept_bytes for plan in regions) + found.moving,
            default_bytes=self.default,
            peak_bytes=step_peak(profiles),
            cost=joined.cost,
            unit=self.model.unit,
            lower_bound=joined.lower_bound,
            seconds=joined.seconds,
        )

    def _placed(self, graph: Graph, part: Problem, placed: Placed, found: OverLink) -> tuple[Plan, Profile]:
        """One region's plan, and what lives while it runs."""
        joined = found.joined
        share = joined.lower_bound / joined.cost if joined.cost > 0 else 1.0
        piece = complete(part, placed.kept | placed.sent)
        assert piece is not None
        solved = Solved(piece, piece.cost * share, "exact", 0.0)
        plan = Plan.of(graph, part, solved, region="", budget=placed.device, unit=self.model.unit)
        sent = tuple(sorted(piece.saved & placed.sent))
        away = sum(int(part.size[v]) for v in sent)
        live = profile(graph, piece)
        most = live.forward + found.moving, live.backward + found.moving
        live = replace(live, kept=piece.bytes - away, forward=most[0], backward=most[1])
        return replace(plan, kept_bytes=piece.bytes - away, sent=sent, sent_bytes=away), live

    def _model_plan(self, solved: Solved, budget: int) -> ModelPlan:
        pieces = split(self.parts, solved.solution)
        peak = step_peak(
            [profile(graph, piece) for (_, graph), piece in zip(self.graphs, pieces, strict=True)]
        )
        return ModelPlan(
            fn=self.fn,
            regions=tuple(self._regions(pieces, solved)),
            budget=budget,
            kept_bytes=solved.solution.bytes,
            default_bytes=self.default,
            peak_bytes=peak,
            cost=solved.solution.cost,
            unit=self.model.unit,
            lower_bound=solved.lower_bound,
            seconds=solved.seconds,
        )

    def _regions(self, pieces: list[Solution], solved: Solved) -> Iterator[Plan]:
        for (name, graph), part, piece in zip(self.graphs, self.parts, pieces, strict=True):
            # The proof is of the whole: a region is as good as that for the bytes that it was given.
            share = Solved(piece, piece.cost * (1 - solved.gap), solved.solver, 0.0)
            yield Plan.of(graph, part, share, region=name, budget=piece.bytes, unit=self.model.unit)

    def within_peak(self, limit: int) -> ModelPlan:
        """The cheapest plan found whose simulated peak is within `limit`."""
        low = least(self.whole).bytes
        found = [self._chained(limit)]
        lowest = self.chain.lowest(nested=False)
        try:
            high = max(self.default, low)
            found.append(highest_within(limit, low, high, self.plan, lambda plan: plan.peak_bytes))
        except OutOfReach as error:
            lowest = min(lowest, error.lowest)
        plans = [plan for plan in found if plan is not None]
        if not plans:
            raise OutOfReach(limit, lowest)
        return min(plans, key=lambda plan: plan.cost)

    @cached_property
    def chain(self) -> Chain:
        """The regions in the order in which they are called, equal ones measured once."""
        made: dict[Any, Stage] = {}
        for _, graph in self.graphs:
            if graph.signature not in made:
                made[graph.signature] = Measure(graph, self.model).stage()
        return Chain([made[graph.signature] for _, graph in self.graphs])

    def _chained(self, limit: int) -> ModelPlan | None:
        """The plan of the search that knows when kept bytes go (`chain_search`); None where it finds none."""
        start = time.perf_counter()
        parts = best_parts(self.chain, limit, nested=False)
        if parts is None:
            return None
        pieces = [
            complete(part, self.chain.choice(one).saved) for part, one in zip(self.parts, parts, strict=True)
        ]
        solution = joined(self.parts, [piece for piece in pieces if piece is not None])
        floor = bound(hull(self.whole, around=solution.bytes), solution.bytes)
        solved = Solved(solution, min(floor, solution.cost), "chain", time.perf_counter() - start)
        return self._model_plan(solved, solution.bytes)


def _regions(fn: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[str, Graph]]:
    """The graphs of the regions met in one run on fake tensors.

    The regions do not run in it. Where that is not to the liking of the code around them, they do.
    """
    regions = Regions(plans_by_budget)

    def note(region: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, None]:
        if free := not under_hooks():
            regions.note(region, graph_of(region, args, kwargs))
        return free, None

    with looking(fn, args, kwargs), handling(note):
        try:
            with regions.meeting():
                on_fakes(fn, args, kwargs)
        except NotOnFakes:
            regions.found.clear()
            on_fakes(fn, args, kwargs)
    return [(met.name, met.graph) for met in regions.found]


def plans_by_budget(policy: Policy) -> bool:
    """Whether a policy asks for a plan of the model when it meets a region."""
    return getattr(policy, "plans_by_budget", False)


def union(parts: Sequence[Problem]) -> Problem:
    """Independent problems side by side, as one."""
    cost: list[float] = []
    reads: list[tuple[int, ...]] = []
    producer: list[int] = []
    size: list[float] = []
    need: set[int] = set()
    for part in parts:
        ops, values = len(cost), len(producer)
        cost += part.cost
        reads += [tuple(v + values for v in read) for read in part.reads]
        producer += [o + ops for o in part.producer]
        size += part.size
        need |= {v + values for v in part.need}
    return Problem(tuple(cost), tuple(reads), tuple(producer), tuple(size), need=frozenset(need))


def split(parts: Sequence[Problem], solution: Solution) -> list[Solution]:
    """A solution of `union(parts)` as one of each part."""
    ops = values = 0
    pieces = []
    for part in parts:
        saved = frozenset(v - values for v in solution.saved if 0 <= v - values < len(part.producer))
        replayed = frozenset(o - ops for o in solution.replayed if 0 <= o - ops < len(part.cost))
        size = sum(int(part.size[v]) for v in saved if part.size[v] < INF)
        pieces.append(Solution(saved, replayed, size, sum(part.cost[o] for o in replayed)))
        ops, values = ops + len(part.cost), values + len(part.producer)
    return pieces


def joined(parts: Sequence[Problem], pieces: Sequence[Solution]) -> Solution:
    """The other way round: solutions of each part as one of `union(parts)`."""
    ops = values = 0
    saved: set[int] = set()
    replayed: set[int] = set()
    for part, piece in zip(parts, pieces, strict=True):
        saved |= {v + values for v in piece.saved}
        replayed |= {o + ops for o in piece.replayed}
        ops, values = ops + len(part.cost), values + len(part.producer)
    total = sum(piece.bytes for piece in pieces), sum(piece.cost for piece in pieces)
    return Solution(frozenset(saved), frozenset(replayed), *total)
