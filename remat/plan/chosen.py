"""The choice of each region of a step: its plans, the ready policies, or no region."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from remat.plan.chain import Chain, Choice, Measure, best_parts
from remat.plan.compared import saved_by
from remat.plan.graph import CostModel, Graph
from remat.plan.model import pieces_within
from remat.plan.plans import Plan
from remat.plan.solve import INF, Solved, complete, keep_all, margin_of
from remat.plan.step import WholeStep
from remat.policies import Policy, save_everything, save_nothing
from remat.transforms import RematError

# So often the search is asked; and what part of a limit is too little to ask again.
_TRIES, _CLOSE = 5, 100


@dataclass(frozen=True)
class Ready(Choice):
    """What a policy that somebody wrote does with a region; `name` is empty for no region at all."""

    name: str = ""


@dataclass(frozen=True)
class Chosen:
    """What each region of a step is to do.

    Attributes:
        choices: of each region.
        peak: the most live at once in the step, simulated, over what lives before it.
        cost: price of what runs again.
    """

    choices: tuple[Choice, ...]
    peak: int
    cost: float


class Portfolio:
    """The choices of all regions of a step."""

    def __init__(self, step: WholeStep, model: CostModel, policies: Mapping[str, Policy]) -> None:
        self.step, self.model, self.policies = step, model, policies
        self.stages = step.stages(model, self._ready)

    def _ready(self, measure: Measure) -> list[Choice]:
        """What the policies do with a kind of region, and what it does without one."""
        found: list[Choice] = []
        graph, problem = measure.graph, measure.problem
        # When a region ends, nobody knows that a result is let go of, or that a shape is all that is read.
        every = graph.every or graph
        made = range(len(graph.ops))
        need = problem.need.union(every.problem(self.model).need.intersection(made))
        shapes = every.places(every.joint.shapes)
        for name, policy in self.policies.items():
            if policy == save_everything:
                found.append(Ready(**vars(measure.plain()), name=name))  # there is no region then
                continue
            kept = saved_by(policy, graph, problem) | graph.joint.decisions
            # A policy does not keep what is free because it counts elsewhere.
            size = [INF if v in made and v not in kept else s for v, s in enumerate(problem.size)]
            own = replace(problem, size=tuple(size))
            solution, held = complete(own, kept), complete(replace(own, need=need), kept)
            if solution is not None:
                saved = solution.saved.union(held.saved if held else (), kept.intersection(shapes, made))
                solution = replace(solution, saved=saved, bytes=int(sum(size[v] for v in saved)))
                found.append(Ready(**vars(measure.choice(solution)), name=name))
        return found

    def of(self, choices: Sequence[Choice]) -> Chosen:
        """These choices, measured; calls of one module have the same."""
        choices = self._together(choices)
        return Chosen(tuple(choices), self.step.peak(choices), sum(choice.cost for choice in choices))

    def plain(self) -> Chosen:
        """The step without regions."""
        return self.of([stage.plain for stage in self.stages])

    def uniform(self) -> dict[str, Chosen]:
        """The same ready policy everywhere."""
        found: dict[str, Chosen] = {}
        for name in self.policies:
            rows = [
                [c for c in stage.choices if isinstance(c, Ready) and c.name == name] for stage in self.stages
            ]
            if all(rows):
                found[name] = self.of([row[0] for row in rows])
        return found

    def carrier(self, graph: Graph, choice: Choice, region: str) -> Policy | Plan | None:
        """What carries a choice out: a ready policy, a plan, or None where there is to be no region."""
        if isinstance(choice, Ready):
            return self.policies[choice.name]
        if self.step.ran and (choice.saved or choice.cost):
            return save_nothing
        if not choice.saved and choice.cost == 0:
            return None
        return plan_of(graph, self.model, choice, region)

    def planned(self, graph: Graph, choice: Choice, region: str) -> Plan:
        """The same as a plan: a ready policy's, or one that recomputes nothing where there is no region."""
        if choice.saved or choice.cost:
            return plan_of(graph, self.model, choice, region)
        everything = keep_all(graph.problem(self.model))
        kept = frozenset[int]() if everything is None else everything.saved
        return plan_of(graph, self.model, replace(choice, saved=kept), region)

    def leanest(self) -> Chosen:
        """The lowest peak found."""
        found = self.within(self._lowest)
        everywhere = [*self.uniform().values(), *([found] if found else ())]
        return min(everywhere, key=lambda chosen: (chosen.peak, chosen.cost))

    def within(self, limit: int) -> Chosen | None:
        """The cheapest choice within a peak: never dearer than a ready policy everywhere.

        One of those where prices do not tell the difference: it is cheaper to follow.
        """
        uniform = [chosen for chosen in self.uniform().values() if chosen.peak <= limit]
        fitting = [*uniform, *self._searched(limit)]
        cheapest = min(fitting, key=lambda chosen: chosen.cost, default=None)
        if cheapest is None or not uniform:
            return cheapest
        ready = min(uniform, key=lambda chosen: chosen.cost)
        return ready if ready.cost - cheapest.cost < self._margin and cheapest.cost else cheapest

    def keeping(self, budget: float | int | str) -> tuple[int, Chosen]:
        """Bytes of a budget, and the cheapest choice whose regions keep no more between the passes.

        Never dearer than a ready policy everywhere that keeps no more.
        """
        limit, pieces = pieces_within(self.step.graphs, self.model, budget)
        choices = [
            self.step.placed(at, self.step.measure(at, self.model).choice(piece))
            if piece.cost
            else stage.plain
            for at, (piece, stage) in enumerate(zip(pieces, self.stages, strict=True))
        ]
        uniform = [found for found in self.uniform().values() if self.kept(found) <= limit]
        return limit, min([*uniform, self.of(choices)], key=lambda chosen: chosen.cost)

    def kept(self, chosen: Chosen) -> int:
        """Bytes that regions keep between the passes, over what they are given, as budgets count them."""
        found = 0
        for graph, choice in zip(self.step.graphs, chosen.choices, strict=True):
            size = graph.problem(self.model).size
            plain = not choice.saved and not choice.cost
            found += graph.kept_by_default if plain else int(sum(size[v] for v in choice.saved))
        return found

    def _searched(self, limit: int) -> Iterator[Chosen]:
        """What the search finds within a peak.

        It takes all regions to keep what several of them are given, and calls of one module to be free to
        differ. What it finds may so have a lower peak than it is told to keep to, or a higher one.
        """
        chain, asked = self._chain, limit
        for _ in range(_TRIES):
            parts = best_parts(chain, asked, nested=False) if asked >= 0 else None
            if parts is None:
                if asked >= self._lowest:
                    return
                asked = self._lowest
                continue
            found = self.of([chain.stages[p.start].choices[p.choice] for p in parts])
            if found.peak <= limit:
                yield found
                if found.cost == 0 or (limit - found.peak) * _CLOSE < limit:
                    return
            asked += limit - found.peak

    @cached_property
    def _chain(self) -> Chain:
        # A stage may also do without a region; that comes first, as it costs nothing to follow.
        return Chain([replace(stage, choices=(stage.plain, *stage.choices)) for stage in self.stages])

    @cached_property
    def _lowest(self) -> int:
        return Chain(self.stages).lowest(nested=False)

    def _together(self, choices: Sequence[Choice]) -> list[Choice]:
        """Choices of which calls of one module have the same, where they run the same ops: the leanest."""
        groups: dict[Hashable, list[int]] = {}
        for at, (graph, owner) in enumerate(zip(self.step.graphs, self.step.owners, strict=True)):
            if owner is not None:
                groups.setdefault((id(owner), graph.names, graph.joint.sizes), []).append(at)
        found = list(choices)
        for calls in groups.values():
            leanest = min(calls, key=lambda at: found[at].kept)
            for at in calls if len(calls) > 1 else ():
                found[at] = self._like(at, found[leanest])
        return found

    def _like(self, at: int, choice: Choice) -> Choice:
        """The same choice for another call."""
        name = choice.name if isinstance(choice, Ready) else None
        stage = self.stages[at]
        if not choice.saved and not choice.cost:
            return stage.plain
        for one in stage.choices:
            if (name is not None and isinstance(one, Ready) and one.name == name) or (
                name is None and one.saved == choice.saved
            ):
                return one
        measure = self.step.measure(at, self.model)
        solution = complete(measure.problem, choice.saved)
        return stage.choices[0] if solution is None else self.step.placed(at, measure.choice(solution))

    @cached_property
    def _margin(self) -> float:
        """What prices do not tell."""
        accuracy = getattr(self.model, "accuracy", 0.0)
        distinct = {id(graph): graph for graph in self.step.graphs}
        made = {key: margin_of(graph.problem(self.model), accuracy) for key, graph in distinct.items()}
        return sum(made[id(graph)] for graph in self.step.graphs)


def plan_of(graph: Graph, model: CostModel, choice: Choice, region: str) -> Plan:
    """The plan that carries a choice out."""
    problem = graph.problem(model)
    solution = complete(problem, choice.saved)
    if solution is None:
        raise RematError(f"What {region} keeps does not lead to all that its backward reads.")
    solved = Solved(solution, solution.cost, "step", 0.0)
    return Plan.of(graph, problem, solved, region=region, budget=solution.bytes, unit=model.unit)
