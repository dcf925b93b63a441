"""What one stage of a chain can do: its plans, each with its price and the bytes that it takes.

The bytes are those of the engine. In eager the ops of the plan run again, all of them first, then the stage's
backward; kept and recomputed values go after their last reader. What Python's locals hold longer than that is
counted where the graph was recorded from a run of the function.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from remat.plan.graph import CostModel, Graph
from remat.plan.peak import Profile, fresh, profile, simulated
from remat.plan.solve import INF, Problem, Solution, complete, hull, keep_all, least, solve

# Budgets that are tried between the least and the most that a stage can keep.
_BUDGETS = 12
# Of so many values every set is tried, in problems of at most so many ops.
_MIXED, _OPS = 7, 400
_SECONDS = 0.3


@dataclass(frozen=True)
class Choice:
    """One way to run a stage.

    Attributes:
        saved: what is kept, as `Graph.problem` numbers it; empty where there is no region at all.
        cost, flops: price and FLOPs of what runs again.
        kept: bytes between forward and backward, the stage's input included where it is needed.
        forward: the most live in the forward, the input included where it is needed.
        backward: the most live in the backward, over what others keep and parameters' gradients made before;
            kept bytes, the result's gradient and the gradients made are included.
        alone: `forward` and `backward` without what lives outside of the stage, where that is in them.
    """

    saved: frozenset[int]
    cost: float
    flops: float
    kept: int
    forward: int
    backward: int
    alone: tuple[int, int] | None = field(default=None, compare=False, kw_only=True)


@dataclass(frozen=True)
class Stage:
    """A function of a chain, in numbers.

    Attributes:
        choices: plans, the one that keeps least first.
        plain: the stage without a region of its own.
        whole, flops: price and FLOPs of its forward.
        input: bytes of its input, as far as it is needed.
        gradients: bytes of the parameters' gradients that its backward leaves.
    """

    choices: tuple[Choice, ...]
    plain: Choice
    whole: float
    flops: float
    input: int
    gradients: int


class Measure:
    """What the plans of one graph take, by these prices; `options` are those of `peak.simulated`."""

    def __init__(self, graph: Graph, model: CostModel, **options: Any) -> None:
        self.graph, self.options = graph, options
        self.problem = graph.problem(model)

    def stage(self) -> Stage:
        """The stage of a chain that the graph is of."""
        choices = self.choices()
        storages, saved = self.graph.joint.storages, choices[0].saved
        return Stage(
            choices=choices,
            plain=self.plain(),
            whole=sum(c for c in self.problem.cost if c < INF),
            flops=sum(self.graph.flops),
            input=choices[0].kept - sum(storages[s] for s in fresh(self.graph, saved)),
            gradients=self._plain.gradients,
        )

    def choices(self) -> tuple[Choice, ...]:
        """The plans that no other one is as good as in every respect, the one that keeps least first."""
        found = {s.saved: s for s in frontier(self.problem)}
        every = sorted(
            map(self.choice, found.values()), key=lambda c: (c.kept, c.cost, c.backward, c.forward)
        )
        best: list[Choice] = []
        for choice in every:
            if not any(
                c.cost <= choice.cost and c.backward <= choice.backward and c.forward <= choice.forward
                for c in best
            ):
                best.append(choice)
        return tuple(best)

    def choice(self, solution: Solution) -> Choice:
        """What one plan takes."""
        live = profile(self.graph, solution, **self.options)
        flops = sum(self.graph.flops[k] for k in solution.replayed if k < len(self.graph.ops))
        return Choice(solution.saved, solution.cost, flops, live.kept, live.forward, live.backward)

    def plain(self) -> Choice:
        """What autograd takes without a region."""
        live = self._plain
        return Choice(frozenset(), 0.0, 0.0, live.kept, live.forward, live.backward)

    @cached_property
    def _plain(self) -> Profile:
        graph, joint = self.graph, self.graph.joint
        kept = {s for s in joint.held_by_nodes if joint.owner[s] >= 0} - graph.elsewhere
        every = frozenset(range(len(graph.ops)))
        return simulated(graph, kept, every, frozenset(), graph.kept_by_default, **self.options)


def frontier(problem: Problem) -> Iterator[Solution]:
    """Plans from the least to the most that can be kept, and mixtures of them.

    Plans at the corners of the hull and at even budgets know the bytes between forward and backward. They do
    not know what is live while values are recomputed. For that all sets of the largest values are tried.
    """
    low, high = least(problem), keep_all(problem)
    yield low
    if high is None or high.bytes <= low.bytes:
        return
    found = [low, high, *hull(problem)]
    budgets = (low.bytes + (high.bytes - low.bytes) * k // _BUDGETS for k in range(1, _BUDGETS))
    found += [solve(problem, budget, time_limit=_SECONDS).solution for budget in budgets]
    yield from found
    if len(problem.cost) > _OPS:
        return
    seen = {v for solution in found for v in solution.saved if 0 < problem.size[v] < INF}
    largest = sorted(seen - low.saved, key=lambda v: (-problem.size[v], v))[:_MIXED]
    for count in range(1, len(largest) + 1):
        for chosen in itertools.combinations(largest, count):
            mixed = complete(problem, low.saved.union(chosen))
            if mixed is not None:
                yield mixed
