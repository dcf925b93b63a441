"""What one forward of a region tells of later ones: the tape that they are held against, op by op.

Nothing of it is believed before it is seen again. A later forward compares each op before it runs, and turns
into a recording where it leaves the tape. So what is kept here saves time, and changes nothing. A function
that runs again goes the way of its forward, whatever calls have taught since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, TypeAlias

from remat.transforms.caches import BoundedCache
from remat.transforms.pytree import constants_alike
from remat.transforms.tape import Ends, Node, Program, Tape

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
        draws: whether any of its ops draws random numbers.
        dead: the saved values of dead code, which no node had any more once the forward was over.
        hollow: the saved values of which nodes read the shape alone.
    """

    tape: Tape
    program: Program
    kept: frozenset[int]
    held: frozenset[int]
    residual: bool
    ends: Ends | None
    nodes: int
    later: set[int]
    draws: bool
    dead: frozenset[int]
    hollow: frozenset[int]

    def shared(self) -> CachedTrace:
        """The same on the tape of a region that is alike, as are the layers of a model: its memory is taken
        once, and the processor's caches have it from the layer before."""
        tape, program = self.tape, self.program
        ops = hash(tuple([node.op for node in tape.nodes]))
        key = (
            tape.region,
            ops,
            len(tape.saved_values),
            self.kept,
            self.held,
            self.dead,
            self.hollow,
            *program.kept,
        )
        other, made = _shared.get(key), self
        if other is not None and same_tape(tape, other.tape) and program.copied == other.program.copied:
            made = replace(self, tape=other.tape, program=other.program)
        _shared[key] = made
        return made


# Traces by what is soon told of them, and by kinds of regions and signatures; each lives as long as a region
# has it.
_shared: weakref.WeakValueDictionary[Hashable, CachedTrace] = weakref.WeakValueDictionary()
of_kinds: weakref.WeakValueDictionary[Hashable, CachedTrace] = weakref.WeakValueDictionary()
_CALL = ("args", "kwargs", "outs")
_rest_of = attrgetter(*[field.name for field in fields(Node) if field.name not in _CALL])


def same_tape(one: Tape, other: Tape) -> bool:
    """Whether all that two tapes say is the same."""
    apart = {"nodes", "outside", "checks"}
    mine, theirs = vars(one), vars(other)
    if any(mine[name] != theirs[name] for name in mine.keys() - apart) or len(one.nodes) != len(other.nodes):
        return False
    if [(o.root, o.meta) for o in one.outside] != [(o.root, o.meta) for o in other.outside]:
        return False
    return all(map(_same_node, one.nodes, other.nodes))


def _same_node(one: Node, other: Node) -> bool:
    calls = (constants_alike(getattr(one, name), getattr(other, name)) for name in _CALL)
    return _rest_of(one) == _rest_of(other) and all(calls)


# By the signatures of calls.
Traces: TypeAlias = "BoundedCache[Hashable, Any]"  # those of frames are `CachedTrace`


class TraceCache:
    """What is known of one function.

    Attributes:
        differentiates: whether it was seen to call `torch.autograd.grad` or `backward` on values of its own.
        by_levels: whether plain autograd was seen to refuse it, so that torch.func differentiates it, whose
            decompositions know more derivatives.
        hides_leaves: whether it was seen to read a leaf that the search for captured tensors has not found.
        writes_operands: whether a level of torch.func was seen to refuse what it writes to an operand.
        unframed: whether a frame was seen not to serve it under levels of torch.func.
        lasting: traces for calls under hooks of the user's.
        apart: whether a call ran other ops than those of a region of its kind.
        agreed: by policies under which ranks have compared what they keep, what calls did with collectives.
    """

    __slots__ = (
        "__weakref__", "agreed", "apart", "by_levels", "by_policy", "differentiates",
        "hides_leaves", "lasting", "unframed", "writes_operands",
    )  # fmt: skip

    def __init__(self) -> None:
        self.by_policy: BoundedCache[Hashable, Traces] = BoundedCache(_MOST)
        self.differentiates = self.by_levels = self.hides_leaves = self.unframed = self.apart = False
        self.writes_operands = False
        self.lasting = LastingTraces()
        self.agreed: dict[Hashable, set[str]] = {}

    def under(self, policy: Hashable) -> Traces:
        """Traces by the signatures of calls, under the policies with this key."""
        return self.by_policy.made(policy, lambda: BoundedCache(_MOST))


class LastingTraces:
    """Traces by policies and signatures of calls, for calls under saved-tensor hooks of the user's.

    Such hooks may run a region again and count what it packs, as torch's checkpoint does. A forward that
    leaves a trace keeps other values than one that is recorded. So the first call decides, for all later
    ones, what they are held against: its trace; nothing, if it left none.
    """

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: BoundedCache[Hashable, CachedTrace | object | None] = BoundedCache(16 * _MOST)

    def __contains__(self, key: Hashable) -> bool:
        return isinstance(self._found.get(key), CachedTrace)

    def held_against(self, key: Hashable, forward: Callable[[CachedTrace | None], tuple[Any, Any]]) -> Any:
        """Run a forward against what there is; it returns its result and its frame."""
        if key in self._found:
            known = self._found.recall(key)
            if known is not None and not isinstance(known, CachedTrace):
                # The first call is under way, and has called itself.
                known = self._found[key] = None
            return forward(known)[0]
        mine = self._found[key] = object()
        try:
            out, frame = forward(None)
        except BaseException:
            if self._found.get(key) is mine:
                del self._found[key]
            raise
        if self._found.get(key) is mine:
            self._found[key] = frame.lesson()
        return out

    def clear(self) -> None:
        """Drop every trace."""
        self._found.clear()


def cache_of(anchor: Any) -> TraceCache:
    """The cache that all regions around one function share, for as long as `anchor` lives."""
    found = _caches.get(anchor)
    if found is None:
        found = _caches[anchor] = TraceCache()
    return found


def forget_all() -> None:
    """Drop every trace: what policies say of ops has changed."""
    of_kinds.clear()
    for cache in list(_caches.values()):
        for traces in cache.by_policy.values():
            traces.clear()
        cache.lasting.clear()
