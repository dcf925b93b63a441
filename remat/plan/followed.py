"""A plan carried out: a policy that knows each op by its place."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from remat._core import Decision, OpInfo
from remat.policies import Policy
from remat.transforms import RematError, traits
from remat.transforms.compat import in_transform

if TYPE_CHECKING:
    from remat.plan.plan import Plan

# Stands among the numbers of ops for the one that comes next.
_NEXT = -1


@dataclass(frozen=True)
class Following(Policy):
    """A plan carried out among other ops, which are recomputed; those of the plan come in order.

    Forward-mode levels weave tangent ops between those of the plan; a step of a compiled scan takes its row
    out of a block of rows first. Views come and go; they are nobody's to keep. (Where a view was written to,
    autograd makes it anew of its base: by an op in the trace that was planned, without one in eager.)
    """

    plan: Plan
    # The number of an op in the forward -> its position in the plan; `_NEXT` -> the position to be met next.
    places: dict[int, int] = field(default_factory=dict, compare=False, repr=False)
    counts = True

    def fresh(self) -> Policy:
        return type(self)(self.plan)

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
        return Following(self.plan)

    def _unplanned(self, position: int, op: Any) -> int:
        planned = self.plan.ops[position] if position < len(self.plan.ops) else None
        raise RematError(self.plan.difference(position, planned, str(op)))


def carried_out(plan: Plan) -> Following:
    """The policy for the call that is about to run: where other ops may come in between, or where none do."""
    return Following(plan) if in_transform() else Bound(plan)


@functools.cache
def _passed_over(name: str) -> bool:
    """Whether nothing is asked about an op: it is a view, or writes in place, whose result is never kept."""
    namespace, _, rest = name.partition(".")
    kind, _, overload = rest.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), kind, None), overload, None)
    if op is None:
        return kind.endswith("_")
    facts = traits(op)
    return facts.view or (bool(facts.writes) and facts.conditional is None)
