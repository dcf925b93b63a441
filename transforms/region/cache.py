"""What one traced run of a region teaches about later runs of the same function on the same shapes.

A trace costs several microseconds an op. Where its outcome cannot differ the next time (the policy is a
function of the ops; nothing is written, nested, or drawn from generators of the user's), the next run need
not be traced: it runs as it is (`eager.frame.Plain`) or follows the known path (`eager.guarded.Following`).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat.transforms.ops import traits
from remat.transforms.tape import KEPT, Program, Trace

_MOST = 256
_memories: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class Plan:
    """What a trace teaches of the next call with the same signature.

    Attributes:
        near: how many tensors the function had in its near reach (see `Bindings`).
        read: which of those the recomputation reads although autograd does not check them.
        absent: the argument tensors that nothing in the backward reads.
        program: the forward expected and its recomputation; None where running the function again as it is,
            up to the last value packed, is the least work.
    """

    near: int
    read: list[int]
    absent: frozenset[int]
    program: Program | None


class Lessons:
    """What is known of one function under one policy.

    Attributes:
        plans: by the signatures of calls.
        hopeless: signatures of calls that teach nothing.
    """

    __slots__ = ("hopeless", "plans")

    def __init__(self) -> None:
        self.plans: dict[Hashable, Plan] = {}
        self.hopeless: set[Hashable] = set()

    def remember(self, call: Hashable, plan: Plan | None, final: bool) -> None:
        """Note what a call with this signature taught; None: nothing, `final`: nor will another."""
        if plan is not None and len(self.plans) < _MOST:
            self.plans[call] = plan
        elif plan is None and final and len(self.hopeless) < _MOST:
            self.hopeless.add(call)


class Memory:
    """What is known of one function.

    Attributes:
        lessons: by what a policy's verdicts depend on.
        uses_func: whether it was seen to use torch.func inside; then it cannot run under saved-tensor hooks.
        differentiates: whether it was seen to call `torch.autograd.grad` or `backward` on values of its own.
    """

    __slots__ = ("differentiates", "lessons", "uses_func")

    def __init__(self) -> None:
        self.lessons: dict[Hashable, Lessons] = {}
        self.uses_func = False
        self.differentiates = False

    def under(self, key: Hashable) -> Lessons:
        """What is known of the function under the policies with this key."""
        found = self.lessons.get(key)
        if found is None:
            found = Lessons()
            if len(self.lessons) < _MOST:
                self.lessons[key] = found
        return found


def memory_of(anchor: Any) -> Memory:
    """The memory that all regions around one function share, for as long as `anchor` lives."""
    found = _memories.get(anchor)
    if found is None:
        found = _memories[anchor] = Memory()
    return found


def forget_all() -> None:
    """Drop every plan: what policies say of ops has changed."""
    for memory in list(_memories.values()):
        for lessons in memory.lessons.values():
            lessons.plans.clear()
            lessons.hopeless.clear()


def reach(trace: Trace, near: Sequence[torch.Tensor | None], checked: set[int]) -> list[int] | None:
    """Positions in `near` of the outside tensors that the recomputation reads, but for storages in `checked`.

    None when one of them is out of reach: then only a trace can tell whether it was written meanwhile.
    """
    places = {id(tensor): i for i, tensor in enumerate(near)}
    found: list[int] = []
    for key in trace.needed_externals:
        ref, _, where = trace.externals[key]
        if where in checked:
            continue
        tensor = ref()
        if tensor is None or key not in places:
            return None
        found.append(places[key])
    return found


def repeats(trace: Trace) -> bool:
    """Whether another run of the same ops would be treated the same."""
    if trace.loose or trace.opaque or trace.sharded or trace.snapshots or trace.generators:
        return False
    if trace.written or trace.inner or trace.parent is not None:
        return False
    for node in trace.nodes:
        facts = traits(node.op)
        if facts.writes and facts.conditional is None:
            return False
        if node.action == KEPT and node.copied:
            return False
    # What is sent to the host takes a place in the order of forwards.
    return trace.store is None
