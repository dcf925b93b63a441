"""A plan carried out: a policy that knows each op by its place."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from remat._core import Decision, OpInfo
from remat.policies import Policy
from remat.transforms import RematError, traits
from remat.transforms.compat import in_transform
from remat.transforms.joint import OPTIONAL

if TYPE_CHECKING:
    from remat.plan.plan import Plan

# Stand among the numbers of ops for the one that comes next, and for the first that did not fit.
_NEXT, _OUTDATED = -1, -2


@dataclass(frozen=True)
class Following(Policy):
    """A plan carried out among other ops, which are recomputed; those of the plan come in order.

    Forward-mode levels weave tangent ops between those of the plan; a step of a compiled scan takes its row
    out of a block of rows first. Views come and go; they are nobody's to keep. (Where a view was written to,
    autograd makes it anew of its base: by an op in the trace that was planned, without one in eager.)
    """

    plan: Plan
    # Forgets what the plan was made from; None for a plan that the user chose.
    forget: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    # The number of an op in the forward -> its position in the plan; `_NEXT` -> the position to be met next.
    places: dict[int, int] = field(default_factory=dict[int, int], compare=False, repr=False)
    counts = True

    @property
    def key(self) -> Hashable:  # type: ignore[override]
        # Made anew for every call; a plan is not.
        return type(self), self.plan.key

    def fresh(self) -> Policy:
        return type(self)(self.plan, self.forget)

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
        return Following(self.plan, self.forget)

    def _unplanned(self, position: int, op: Any) -> int:
        if _OUTDATED in self.places:
            return -1
        planned = self.plan.ops[position] if position < len(self.plan.ops) else None
        difference = self.plan.difference(position, planned, str(op))
        if self.forget is None:
            raise RematError(difference)
        # Something changed that no key knows of. What is not planned is recomputed: right, if not the least.
        self.forget()
        self.places[_OUTDATED] = position
        warnings.warn(f"{difference} (The next call is planned anew.)", stacklevel=2)
        return -1


def carried_out(plan: Plan, forget: Callable[[], None] | None = None) -> Following:
    """The policy for the call that is about to run: where other ops may come in between, or where none do.

    A plan that can be forgotten was not chosen by the user: ops that do not fit it lead to another one.
    """
    return (Following if in_transform() else Bound)(plan, forget)


@functools.lru_cache(maxsize=4096)
def _passed_over(name: str) -> bool:
    """Whether nothing is asked about an op: it is a view, or writes in place, whose result is never kept.

    Or it may not run at all.
    """
    if name.endswith(OPTIONAL):
        return True
    namespace, _, rest = name.partition(".")
    kind, _, overload = rest.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), kind, None), overload, None)
    if op is None:
        return kind.endswith("_")
    facts = traits(op)
    return facts.view or (bool(facts.writes) and facts.conditional is None)
