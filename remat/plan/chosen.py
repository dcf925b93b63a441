"""The choice of each region of a step: its plans, the ready policies, or no region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from remat.plan.chain import Chain, Choice, Measure, Stage, best_parts
from remat.plan.compared import saved_by
from remat.plan.graph import CostModel, Graph
from remat.plan.plans import Plan
from remat.plan.solve import Solved, complete, margin_of
from remat.plan.step import WholeStep
from remat.policies import Policy
from remat.transforms import RematError


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
        for name, policy in self.policies.items():
            solution = complete(measure.problem, saved_by(policy, measure.graph, measure.problem))
            if solution is not None:
                found.append(Ready(**vars(measure.choice(solution)), name=name))
        return found

    def of(self, choices: Sequence[Choice]) -> Chosen:
        """These choices, measured."""
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
        if not choice.saved and choice.cost == 0:
            return None
        return plan_of(graph, self.model, choice, region)

    def leanest(self) -> Chosen:
        """The lowest peak found."""
        low = Chain(self.stages).lowest(nested=False)
        found = self.within(low)
        everywhere = [*self.uniform().values(), *([found] if found else ())]
        return min(everywhere, key=lambda chosen: (chosen.peak, chosen.cost))

    def within(self, limit: int) -> Chosen | None:
        """The cheapest choices within a peak: never dearer than a ready policy everywhere.

        One of those where prices do not tell the difference: it is cheaper to follow.
        """
        stages = [_without_region(stage) for stage in self.stages]
        parts = best_parts(Chain(stages), limit, nested=False)
        found = [] if parts is None else [self.of([stages[p.start].choices[p.choice] for p in parts])]
        uniform = [chosen for chosen in self.uniform().values() if chosen.peak <= limit]
        fitting = [*uniform, *[chosen for chosen in found if chosen.peak <= limit]]
        cheapest = min(fitting, key=lambda chosen: chosen.cost, default=None)
        if cheapest is None or not uniform:
            return cheapest
        ready = min(uniform, key=lambda chosen: chosen.cost)
        return ready if ready.cost - cheapest.cost < self._margin and cheapest.cost else cheapest

    @cached_property
    def _margin(self) -> float:
        """What prices do not tell."""
        accuracy = getattr(self.model, "accuracy", 0.0)
        distinct = {id(graph): graph for graph in self.step.graphs}
        made = {key: margin_of(graph.problem(self.model), accuracy) for key, graph in distinct.items()}
        return sum(made[id(graph)] for graph in self.step.graphs)


def _without_region(stage: Stage) -> Stage:
    """A stage that may also do without a region; that comes first, as it costs nothing to follow."""
    return replace(stage, choices=(stage.plain, *stage.choices))


def plan_of(graph: Graph, model: CostModel, choice: Choice, region: str) -> Plan:
    """The plan that carries a choice out."""
    problem = graph.problem(model)
    solution = complete(problem, choice.saved)
    if solution is None:
        raise RematError(f"What {region} keeps does not lead to all that its backward reads.")
    solved = Solved(solution, solution.cost, "step", 0.0)
    return Plan.of(graph, problem, solved, region=region, budget=solution.bytes, unit=model.unit)
