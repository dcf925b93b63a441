"""A plan carried out: a policy that knows each op by its place."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from remat._core import Decision, OpInfo
from remat.plan.joint import OPTIONAL
from remat.policies import Policy
from remat.transforms import Key, RematError, traits
from remat.transforms.compat import in_transform
from remat.transforms.tape import Tape

if TYPE_CHECKING:
    from remat.plan.plans.plan import Plan


# Waits for a collective where its result is first read, on fake tensors at once.
WAIT = "_c10d_functional.wait_tensor.default"


class Known(Protocol):
    """What is known of calls; `trust`: what the call at hand was not looked at for, if anything."""

    trust: Any

    @property
    def learns(self) -> bool:
        """Whether what it is told changes later calls."""
        ...

    def learn(self, tape: Tape, fitting: bool = False) -> None:
        """Be told of a forward that was recorded, and whether a plan fitted it."""


class PlanCursor:
    """How far one forward has come: on which plan, at which of its positions, with what kept."""

    def __init__(self, plan: Plan | None) -> None:
        self.plan, self.at = plan, 0
        self.met: list[tuple[str, int]] = []
        self.said: dict[int, Decision] = {}  # of each op: it may be asked about again
        self.bytes = 0
        self.switched = False

    def follow(self, name: str, size: int = 0) -> bool:
        """Whether an op that is met now, whose results take `size` bytes, is the next one of the plan."""
        plan = self.plan
        if plan is None:
            return False
        at, ops = self.at, plan.ops
        while at < len(ops) and _passed_over(ops[at]):
            at += 1
        met = at < len(ops) and ops[at] == name and size <= plan.sizes.get(at, size)
        self.at = at + met
        return met

    def turn(self, plan: Plan) -> bool:
        """Whether all that was met is what another plan begins with; that is followed from here on then."""
        other = PlanCursor(plan)
        if not all(other.follow(*op) for op in self.met):
            return False
        self.plan, self.at, self.switched = plan, other.at, True
        return True

    def wanted(self, size: int) -> bool:
        """Whether the op at hand, of this many bytes, is to be kept."""
        plan = self.plan
        assert plan is not None
        if self.at - 1 not in plan.chosen or (self.switched and self.bytes + size > plan.kept_bytes):
            return False
        self.bytes += size
        return True

    def kind(self) -> Decision:
        """How the op at hand is kept: here, or on the host."""
        sent = () if self.plan is None else self.plan.sent
        return Decision.OFFLOAD if self.at - 1 in sent else Decision.SAVE


@dataclass(frozen=True)
class Following(Policy):
    """Plans carried out among other ops, which are recomputed; those of a plan come in order.

    Forward-mode levels weave tangent ops between those of the plan; a step of a compiled scan takes its row
    out of a block of rows first. Views come and go; they are nobody's to keep. (Where a view was written to,
    autograd makes it anew of its base: by an op in the trace that was planned, without one in eager.)
    """

    # A function that takes several paths has a plan for each; the likeliest comes first.
    plans: tuple[Plan, ...]
    # Of the call that they were made for; None where the user chose the plan.
    known: Known | None = field(default=None, compare=False, repr=False)
    # Whether torch.compile alone would keep no more.
    needless: bool = field(default=False, compare=False, repr=False)
    counts = planned = True

    @functools.cached_property
    def walk(self) -> PlanCursor:
        """Where the forward at hand is."""
        return PlanCursor(self.plans[0] if self.plans else None)

    @property
    def asks_again(self) -> bool:  # type: ignore[override]
        # What nothing is known of is to be told of; another function's trace would tell nobody.
        return self.known is not None and self.known.learns and not self.plans

    @property
    def left_to_compiler(self) -> bool:
        """Whether compiled code keeps no more without the plan: all that autograd keeps may be kept, or a
        compiler left to itself keeps less."""
        plans = self.plans
        free = all(p.cost == 0 and not p.sent and p.budget >= p.default_bytes for p in plans)
        return self.needless or (bool(plans) and free)

    @functools.cached_property
    def key(self) -> Hashable:
        """What those of the same plans have in common, whatever each learns."""
        return Key(type(self), *[plan.key for plan in self.plans])

    def fresh(self) -> Policy:
        return type(self)(self.plans, self.known)

    def __call__(self, info: OpInfo) -> Decision:
        # An op is asked about once more when its value has got a name.
        walk, name = self.walk, str(info.op)
        if info.index not in walk.said:
            saves = not traits(info.op).view and name != WAIT and self._saves(name, info)
            walk.said[info.index] = walk.kind() if saves else Decision.RECOMPUTE
        return walk.said[info.index]

    def _saves(self, name: str, info: OpInfo) -> bool:
        return self.walk.follow(name) and self.walk.wanted(info.bytes)


@dataclass(frozen=True)
class Bound(Following):
    """Plans that were made for this very call: there is no other op.

    Where another one comes all the same, something changed that no key knows of. What is not planned is
    recomputed: right, if not the least.
    """

    def interleaved(self) -> Policy:
        return Following(self.plans, self.known)

    def _saves(self, name: str, info: OpInfo) -> bool:
        walk = self.walk
        if walk.plan is None:
            return False
        # A plan that the user chose may have been made for other sizes, and a compiler may leave sizes open.
        sized = self.known is not None and type(info.bytes) is int
        walk.met.append((name, info.bytes if sized else 0))
        if not walk.follow(*walk.met[-1]) and not any(map(walk.turn, self.plans)):
            if self.known is None:
                plan = self.plans[0]
                planned = plan.ops[walk.at] if walk.at < len(plan.ops) else None
                raise RematError(plan.difference(walk.at, planned, name))
            walk.plan = None
            return False
        return walk.wanted(info.bytes)

    def finished(self, tape: Tape) -> None:
        if self.known is not None:
            self.known.learn(tape, self.walk.plan is not None)


def carried_out(plans: Sequence[Plan], known: Known | None = None) -> Following:
    """The policy for the call that is about to run: where other ops may come in between, or where none do."""
    return (Following if in_transform() else Bound)(tuple(plans), known)


@functools.lru_cache(maxsize=4096)
def _passed_over(name: str) -> bool:
    """Whether nothing is asked about an op: it is a view, or writes in place, whose result is never kept.

    Or it may not run at all.
    """
    if name.endswith(OPTIONAL) or name == WAIT:
        return True
    namespace, _, rest = name.partition(".")
    kind, _, overload = rest.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), kind, None), overload, None)
    if op is None:
        return kind.endswith("_")
    facts = traits(op)
    return facts.view or (bool(facts.writes) and facts.conditional is None)
