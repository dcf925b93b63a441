"""What plans promise of an eager step: its seconds, its kept bytes, and regions that make it fit a peak."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.common.models import Around, Problem
from remat import checkpoint_policy, remat
from remat._overrides import standing_for
from remat.plan import (
    BUILT_IN_POLICIES,
    Choice,
    Chosen,
    Measure,
    Plan,
    Portfolio,
    carried_out,
    complete,
    cost_model,
    measuring,
    plans_by_budget,
    speeds_of,
    step_of,
)
from remat.plan.graph import is_view


@contextlib.contextmanager
def probed_anew() -> Iterator[None]:
    """Within, the speeds at hand are those of a new probe."""
    before = os.environ.get("REMAT_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REMAT_CACHE"] = folder
        try:
            with measuring():
                yield
        finally:
            if before is None:
                del os.environ["REMAT_CACHE"]
            else:
                os.environ["REMAT_CACHE"] = before


class Predicted:
    """The step of a problem, planned without data: each of its blocks is a region."""

    def __init__(self, problem: Problem) -> None:
        loss, leaves = problem.bind(Around(lambda fn: remat(fn, policy=checkpoint_policy(budget=1.0))))
        own, self.device = leaves(problem.params), str(problem.batch.device)
        self.run: Callable[[], torch.Tensor] = partial(loss, own, problem.batch)
        step = step_of(loss, (own, problem.batch), {}, wanted=plans_by_budget)
        self.portfolio = Portfolio(step, cost_model("roofline", self.device), BUILT_IN_POLICIES)

    def seconds(self, choices: Sequence[Choice] = ()) -> float:
        """Of forward and backward, by the speeds at hand: all ops, what runs again, and the regions.

        Without choices there are no regions. A view moves nothing, and is called as any op is.
        """
        step, model, speeds = self.portfolio.step, self.portfolio.model, speeds_of(self.device)
        joints = [step.outside, *(graph.joint for graph in step.graphs)]
        taken = {id(j): sum(model.price(j, op) or speeds.op() for op in j.ops) for j in joints}
        total = sum(taken[id(joint)] for joint in joints)
        for graph, choice in zip(step.graphs, choices, strict=False):
            if choice.saved or choice.cost:
                again = complete(graph.problem(model), choice.saved)
                assert again is not None
                ops = sum(not is_view(graph.joint, op) for op in graph.ops)
                # What the host does for a region is hidden where it runs ahead of a card.
                total += again.cost + (speeds.region(ops) if self.device == "cpu" else 0.0)
        return total

    def kept(self, choices: Sequence[Choice]) -> int:
        """Bytes between forward and backward."""
        return self.portfolio.step.kept(choices)

    def budget(self, share: float) -> tuple[Choice, ...]:
        """What each region does under a budget."""
        policy, plans = checkpoint_policy(budget=share), list[Plan]()

        def stand(fn: Any, _: Any, args: Any, kwargs: Any) -> None:
            plans.append(policy.plan(fn, *args, **kwargs))  # type: ignore[attr-defined]

        with standing_for(stand):
            self.run()
        return tuple(map(self._choice, self.portfolio.step.graphs, plans))

    def _choice(self, graph: Any, plan: Plan) -> Choice:
        measure = Measure(graph, self.portfolio.model)
        inputs = range(len(graph.ops), len(measure.problem.size))
        solution = complete(measure.problem, [*plan.saved, *inputs])
        assert solution is not None
        return measure.choice(solution)

    def fit(self, what: str) -> Chosen:
        """The choice within the peak of a ready policy, or a share of the way to that without remat."""
        if what in BUILT_IN_POLICIES:
            limit = self.portfolio.uniform()[what].peak
        else:
            low, high = self.portfolio.leanest().peak, self.portfolio.plain().peak
            limit = low + int(float(what) * (high - low))
        chosen = self.portfolio.within(limit)
        assert chosen is not None
        return chosen

    def around(self, chosen: Chosen) -> Around:
        """Regions that do so, in the order of their calls."""
        step = self.portfolio.step
        found = map(self.portfolio.carrier, step.graphs, chosen.choices, step.names)
        policies = [carried_out([one]) if isinstance(one, Plan) else one for one in found]
        turns = itertools.cycle(range(len(policies)))

        def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
            regions = [fn if policy is None else remat(fn, policy=policy) for policy in policies]
            return lambda *args, **kwargs: regions[next(turns)](*args, **kwargs)

        return Around(wrap)
