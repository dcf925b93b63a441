"""What one forward of a region tells of later ones: the tape that they are held against, op by op.

Nothing of it is believed before it is seen again. A later forward compares each op before it runs, and turns
into a recording where it leaves the tape. So what is kept here saves time, and changes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

from remat.transforms.caches import BoundedCache
from remat.transforms.tape import Ends, Program, Tape

# How many signatures of calls, or policies, are told apart; what was used least recently goes first.
_MOST = 32
_caches: weakref.WeakKeyDictionary[Any, TraceCache] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class CachedTrace:
    """A settled forward, without any of its tensors.

    Attributes:
        tape, program: its ops, and those that run again.
        kept: the ops whose results are kept.
        held: the tensors from outside that are held, by their positions on the tape.
        residual: whether all that autograd saves is held instead, as the smaller thing.
        ends: the autograd nodes that made the results, and those behind each, where these differ.
        nodes: how many autograd nodes the forward made.
        later: the saved values that a backward in parts reads again, as far as one was seen.
    """

    tape: Tape
    program: Program
    kept: frozenset[int]
    held: frozenset[int]
    residual: bool
    ends: Ends | None
    nodes: int
    later: set[int]


# By the signatures of calls.
Traces: TypeAlias = "BoundedCache[Hashable, CachedTrace]"


class TraceCache:
    """What is known of one function.

    Attributes:
        uses_func: whether it was seen to use torch.func inside; then it cannot run under saved-tensor hooks.
        differentiates: whether it was seen to call `torch.autograd.grad` or `backward` on values of its own.
        by_levels: whether plain autograd was seen to refuse it, so that torch.func differentiates it, whose
            decompositions know more derivatives.
        hides_leaves: whether it was seen to read a leaf that the search for captured tensors has not found.
        agreed: by policies under which ranks have compared what they keep, what calls did with collectives.
    """

    __slots__ = (
        "__weakref__", "agreed", "by_levels", "by_policy", "differentiates", "hides_leaves", "uses_func"
    )  # fmt: skip

    def __init__(self) -> None:
        self.by_policy: BoundedCache[Hashable, Traces] = BoundedCache(_MOST)
        self.uses_func = self.differentiates = self.by_levels = self.hides_leaves = False
        self.agreed: dict[Hashable, set[str]] = {}

    def under(self, policy: Hashable) -> Traces:
        """Traces by the signatures of calls, under the policies with this key."""
        return self.by_policy.made(policy, lambda: BoundedCache(_MOST))


def cache_of(anchor: Any) -> TraceCache:
    """The cache that all regions around one function share, for as long as `anchor` lives."""
    found = _caches.get(anchor)
    if found is None:
        found = _caches[anchor] = TraceCache()
    return found


def forget_all() -> None:
    """Drop every trace: what policies say of ops has changed."""
    for cache in list(_caches.values()):
        for traces in cache.by_policy.values():
            traces.clear()
