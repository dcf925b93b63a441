"""What one stage of a chain can do: its plans, each with its price and the bytes that it takes.

The bytes are those of the engine. In eager the ops of the plan run again, all of them first, then the stage's
backward; kept and recomputed values go after their last reader. Python's locals, which hold values a little
longer in the forward, are not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass

from remat.plan.graph import CostModel, Graph
from remat.plan.peak import backward_order, fresh, gradients_left, live_bytes
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
    """

    saved: frozenset[int]
    cost: float
    flops: float
    kept: int
    forward: int
    backward: int


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
    """What the plans of one graph take.

    Args:
        graph: of the stage.
        model: prices.
        last: of the last stage of a chain the result's gradient is not counted: it lives before.
        compiled: the backward is a compiled one, where what runs again does so right before its first reader.
        accumulating: parameters' gradients are added to buffers that live before, and go at once.
    """

    def __init__(
        self,
        graph: Graph,
        model: CostModel,
        *,
        last: bool = False,
        compiled: bool = False,
        accumulating: bool = False,
    ) -> None:
        self.graph, self.joint, self.compiled = graph, graph.joint, compiled
        self.problem = graph.problem(model)
        left = gradients_left(self.joint)
        self.left = set() if accumulating else left
        self.ended = {self.joint.values[v].storage for v in self.joint.gradients} - (left - self.left)
        self.tangents = set() if last else {v.storage for v in self.joint.values if v.origin == "tangent"}

    def stage(self) -> Stage:
        """The stage of a chain that the graph is of."""
        choices = self.choices()
        return Stage(
            choices=choices,
            plain=self._plain(),
            whole=sum(c for c in self.problem.cost if c < INF),
            flops=sum(self.graph.flops),
            input=choices[0].kept - self._bytes(fresh(self.graph, choices[0].saved)),
            gradients=self._bytes(self.left),
        )

    def choices(self) -> tuple[Choice, ...]:
        """The plans that no other one is as good as in every respect, the one that keeps least first."""
        found = {s.saved: s for s in frontier(self.problem)}
        every = sorted(
            map(self.choice, found.values()), key=lambda c: (c.kept, c.cost, c.backward, c.forward)
        )
        least: list[Choice] = []
        for choice in every:
            if not any(
                c.cost <= choice.cost and c.backward <= choice.backward and c.forward <= choice.forward
                for c in least
            ):
                least.append(choice)
        return tuple(least)

    def choice(self, solution: Solution) -> Choice:
        """What one plan takes."""
        kept = fresh(self.graph, solution.saved)
        held = solution.bytes - self._bytes(kept)
        backward = self._backward(kept, solution.saved, solution.replayed) + held
        flops = sum(self.graph.flops[k] for k in solution.replayed if k < len(self.graph.ops))
        return Choice(
            solution.saved, solution.cost, flops, solution.bytes, self._forward(kept) + held, backward
        )

    def _plain(self) -> Choice:
        """What autograd takes without a region."""
        joint, count = self.joint, len(self.graph.ops)
        kept = {s for v in joint.saved if joint.owner[s := joint.values[v].storage] >= 0}
        held = self.graph.kept_by_default - self._bytes(kept)
        backward = self._backward(kept, frozenset(range(count)), frozenset()) + held
        return Choice(frozenset(), 0.0, 0.0, self.graph.kept_by_default, self._forward(kept) + held, backward)

    def _forward(self, kept: Set[int]) -> int:
        results = {self.joint.values[v].storage for v in self.joint.results}
        return live_bytes(self.joint, self.graph.ops, start=set(), forever={*kept, *results})

    def _backward(self, kept: Set[int], saved: Set[int], replayed: Set[int]) -> int:
        """The most live in the backward, inputs aside."""
        order = backward_order(self.graph, saved, replayed, self.compiled)
        return live_bytes(self.joint, order, start={*kept, *self.tangents}, forever=self.ended)

    def _bytes(self, storages: Set[int]) -> int:
        return sum(self.joint.storages[s] for s in storages)


def frontier(problem: Problem) -> Iterator[Solution]:
    """Plans from the least to the most that can be kept, and mixtures of them.

    Those at the corners of the hull and at even budgets know the bytes between forward and backward, not what
    is live while values are recomputed: for that all sets of the largest values are tried.
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
