"""Running a region's function again under the tape of its forward: kept values are handed out.

For recomputations that need a history (`torch.func` levels, rules of their own) or whose tape is open. What
user code can see is real. `Recorded` is what a primitive's forward leaves for that.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from remat.transforms.closure import of_captured
from remat.transforms.compat import function_modes_asked, memory_is_real
from remat.transforms.context import Mode, active, past_function_modes, untracked
from remat.transforms.errors import RematError, not_repeated, written
from remat.transforms.ops import (
    Operands,
    Traits,
    alike,
    is_cast_of_leaf,
    is_hollow,
    is_shape_arithmetic,
    metadata,
    octets,
    storage,
    targets,
    tensors_in,
    traits,
    version_of,
)
from remat.transforms.placeholders import mapped, without_objects
from remat.transforms.state import RandomState, drawing_again, same_numbers
from remat.transforms.tape.follower import Check, checks_of, constants_just
from remat.transforms.tape.kept_values import holds
from remat.transforms.tape.recorder import Recorder
from remat.transforms.tape.snapshots import (
    Snapshot,
    but_written,
    data_again,
    handed_out,
    lent,
    sent_away,
    versions_again,
)
from remat.transforms.tape.tape import KEPT, RUN, Node, RecomputeSteps, Tape, let_go, pairs, same_constants

if TYPE_CHECKING:
    from remat.transforms.region import Region


class Replay(Mode):
    """Runs a region again: kept values are handed out, and other ops run.

    Args:
        tape: of the forward.
        needs: what runs.
        kept: what is kept, by op.
        random: the generator's state before each op that draws.
        snapshots: (storage of a tensor from outside, what was in it before the forward wrote to it).
        check: compare ops' constants, and shape, dtype and device of their results.
        digest: as for `Recorder`.
        casts: as for `Recorder`.
        absent: ops that may be left out.
        operands: what is known of the values of this run, None to compare no operands.
        freed: memories from outside that the function frees and fills. It fills those that are empty by then.
        fetches: whether the function gives tensors from outside other memory. That may take other ops than
            in the forward (weights are there, or stay). From such an op on all runs as it is (`astray`).
    """

    def __init__(
        self,
        tape: Tape,
        needs: RecomputeSteps,
        kept: Mapping[int, Any],
        *,
        random: Mapping[int, Any],
        snapshots: list[tuple[int, Snapshot]],
        check: bool = True,
        digest: Callable[[Any], Any] | None = None,
        casts: bool = False,
        absent: Callable[[], Absent],
        operands: Operands | None = None,
        freed: Collection[int] = (),
        fetches: bool = False,
    ) -> None:
        super().__init__()
        self.fetches, self.astray = fetches, False
        self.freed = freed
        self.operands = operands
        self.absent, self._left = absent, set[int]()
        self._absent: Absent | None = None
        self.tape, self.needs, self.kept, self.random = tape, needs, kept, random
        self.check, self.digest, self.casts = check, digest, casts
        self.at = 0
        self.done = False
        # Values of this run by number.
        self._there: dict[int, weakref.ref[torch.Tensor]] = {}
        seen = operands is None or digest is not None or freed or fetches or casts or tape.sharded
        self.checks: Sequence[Check | None] = () if seen or snapshots else plain_checks(tape, needs)
        copies = {id(snapshot): untracked(snapshot.copy) for _, snapshot in snapshots}
        # Memory from outside that the forward wrote to, by its storage: the outside sees a write once.
        self.scratch = {key: copies[id(snapshot)] for key, snapshot in snapshots}

    @property
    def position(self) -> int:
        return self.at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function_modes_asked():  # an op of C++: the user's modes know nothing of it
            with past_function_modes():
                return self.__torch_dispatch__(func, types, args, kwargs)
        if self.at < len(self.checks) and not (active.untracked or self.done or self._left or kwargs):
            check = self.checks[self.at]
            if check is not None and check.op is func and self._is_just(check, args):
                self.at += 1
                return self._enter(check.first, func(*args))
        kwargs = kwargs or {}
        if types and not active.untracked and self.takes_apart(types, args):
            return NotImplemented
        facts = traits(func)
        if self._is_none(facts, func, args, kwargs):
            return func(*args, **kwargs)
        at = self._next((func, args, kwargs))
        if self.fetches and (
            at >= len(self.tape.nodes) or not self._follows(self.tape.nodes[at], func, args, kwargs)
        ):
            self.astray = True
            return func(*args, **kwargs)
        if at >= len(self.tape.nodes):
            if self.tape.inner:
                return func(*args, **kwargs)  # of a region inside, of whose names gradients are wanted
            raise self._differs(at, f"the forward was over, the recomputation runs {func}")
        if at > self.at and self._absent is not None:
            skipped = self._absent.filled.intersection(range(self.at, at))
            self._left.update(i for i in skipped if not self.tape.nodes[i].optional)
        self.at = at + 1
        node = self.tape.nodes[at]
        if node.op is not func:
            raise self._differs(at, f"the forward ran {node.op}, the recomputation runs {func}")
        if self.check and not (same_constants(node.args, args) and same_constants(node.kwargs, kwargs)):
            raise self._differs(at, f"{func} is called with other constants than in the forward")
        if self._left and self._absent and not self._absent.stands_in(node, args, kwargs, self._left):
            raise self._differs(at, f"{func} reads another tensor than in the forward, from a cache")
        if self.operands is None:
            return self._do(at, node, facts, func, args, kwargs)
        read = () if node.shape_only else pairs((node.args, node.kwargs), (args, kwargs))
        # In a plan's run on tensors without data, what is captured becomes such a tensor anew each time.
        if (unlike := self.operands.unlike(read, self.absent)) and memory_is_real():
            raise self._differs(at, f"{func} reads {unlike}")
        self.operands.made(node, out := self._do(at, node, facts, func, args, kwargs))
        return out

    def _is_none(self, facts: Traits, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call is no op of the function's forward."""
        if active.untracked or facts.ignored or self.done or self.astray:
            return True
        return (
            (self.casts and is_cast_of_leaf(func, args))
            or (not self.tape.meta and is_shape_arithmetic(args, kwargs))
            or (self.tape.sharded and not torch.is_grad_enabled())
            or (bool(self.freed) and self._fills((func, args, kwargs), facts))
        )

    def _is_just(self, check: Check, args: Any) -> bool:
        """Whether an op is called as in the forward, as far as a look at its arguments tells."""
        return (
            check.count == len(args)
            and constants_just(check.constants, args)
            and all(map(self._is_value, check.refs, itertools.repeat(args)))
        )

    def _is_value(self, ref: tuple[int, int], args: Any) -> bool:
        at, number = ref
        known = self._there.get(number)
        if known is not None and known() is args[at]:
            return True
        assert self.operands is not None
        return isinstance(args[at], torch.Tensor) and self.operands.lies_at(number, args[at])

    def _enter(self, number: int, out: Any) -> Any:
        """Note what an op has made, the first with this number."""
        assert self.operands is not None
        for made, tensor in enumerate((out,) if isinstance(out, torch.Tensor) else tensors_in(out), number):
            self._there[made] = weakref.ref(tensor)
            self.operands.add(made, tensor)
        return out

    def _follows(self, node: Node, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an op is the one that comes next on the tape, with its constants."""
        return node.op is func and same_constants(node.args, args) and same_constants(node.kwargs, kwargs)

    def _do(self, at: int, node: Node, facts: Traits, func: Any, args: Any, kwargs: Any) -> Any:
        if self.scratch:
            args, kwargs = mapped(torch.Tensor, self._on_scratch, (args, kwargs))
        if self.needs.actions[at] == KEPT:
            made = kwargs.get("generator") is not node.kwargs.get("generator")  # in this run
            if node.draws and (made or self.tape.scanned):
                # A region or scan inside notes where the generators are, for its own backward.
                self._run(at, node, facts, func, args, kwargs)
            return self._hand_out(at)
        return self._run(at, node, facts, func, args, kwargs)

    def _fills(self, call: Any, facts: Traits) -> bool:
        """Whether an op fills memory that was full in the forward. One that reads such before is refused."""
        func, args, kwargs = call
        if facts.writes and any(storage(t) in self.freed for t in targets(facts, args, kwargs)):
            at = self._next(call)
            return at >= len(self.tape.nodes) or self.tape.nodes[at].op is not func
        if not facts.view and any(
            is_hollow(t) for t in tensors_in((args, kwargs)) if storage(t) in self.freed
        ):
            raise self._differs(self.at, f"{func} reads memory that is freed. Let the function fill it, too")
        return False

    def _next(self, call: Any = None) -> int:
        """The number of the op that is to come, past those that need not occur; `call`: what runs."""
        at, nodes = self.at, self.tape.nodes
        while at < len(nodes):
            node = nodes[at]
            if not (node.optional or self.tape.passes(node)):
                if self._absent is None and call is not None and node.op is call[0]:
                    break
                self._absent = self._absent or self.absent()
                if at not in self._absent.ops or (call is not None and self._is(node, *call)):
                    break
            at += 1
        return at

    def _is(self, node: Node, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an op that may be left out is the one that runs."""
        return (
            self._follows(node, func, args, kwargs)
            and self._absent is not None
            and self._absent.stands_in(node, args, kwargs, self._left, shapes=True)
        )

    def has_run(self, count: int) -> bool:
        """Whether so many ops of the forward have had their turn, those aside that need not occur."""
        if self.at == count:
            return True
        here, self.at = self.at, count
        there = self._next()
        self.at = here
        return self._next() == there

    def forward_done(self) -> None:
        """What follows belongs to the backward, which goes through this pass: no op may be missing."""
        at = self._next()
        if at < len(self.tape.nodes):
            raise self._differs(at, f"the recomputation ends where the forward ran {self.tape.nodes[at].op}")
        self.done = True

    def _run(self, at: int, node: Node, facts: Traits, func: Any, args: Any, kwargs: Any) -> Any:
        if node.draws and (state := self.random.get(at)) is not None:
            out = state.draw_again(self.tape.region, func, *args, **kwargs)
        else:
            out = func(*args, **kwargs)
        made = without_objects(metadata(out)) if facts.collective else metadata(out)
        if self.check and not alike(made, node.outs):
            raise self._differs(at, f"{func} made {node.outs} in the forward and now makes {made}")
        if node.digest is not None and self.digest is not None and untracked(self.digest, out) != node.digest:
            raise self._differs(at, f"{func} gave other numbers than in the forward, bit for bit")
        return out

    def _hand_out(self, at: int) -> Any:
        return untracked(handed_out, self.kept[at], at in self.needs.copied)

    def _on_scratch(self, tensor: torch.Tensor) -> torch.Tensor:
        scratch = self.scratch.get(storage(tensor))
        return tensor if scratch is None else untracked(scratch.view, tensor)

    def _differs(self, at: int, what: str) -> RematError:
        return RematError(not_repeated(self.tape.region, f"at op {at}, {what}"))


class PrimitiveTrace(NamedTuple):
    """What a forward of a primitive tells of the next: its ops, what is kept of them, and what runs again."""

    tape: Tape
    kept: frozenset[int]
    needs: RecomputeSteps


class Recorded:
    """One settled forward.

    Args:
        region: whose forward.
        recorder: what watched it.
        outs: the results, below all levels.
        random: the generators before the forward.
        read: the values that autograd's nodes have saved. What is kept for none of them is let go of.
        known: what an earlier call has taught, if this one was the same.
    """

    def __init__(
        self,
        region: Region,
        recorder: Recorder,
        outs: Sequence[torch.Tensor],
        random: RandomState | None,
        read: Collection[int],
        known: PrimitiveTrace | None = None,
    ) -> None:
        self.region, self.tape, self.random = region, recorder.tape, random
        self.draws = recorder.random
        self.replaced = [(r.tensor, r.before if r.met else None) for r in recorder.replaced]
        self.raw = recorder.raw_writes(but=recorder.snapshots) if recorder.shown else []
        tape = self.tape
        if recorder.parent is not None and known is None:
            recorder.share_around()
        given = let_go(recorder)
        met = {at for node in tape.nodes for at in node.external}
        self.given = {at: g for at, g in enumerate(given) if at in met or g.snapshot is not None}
        kept = {} if tape.loose else recorder.kept
        if known is not None:
            kept = {at: kept[at] for at in known.kept}
        elif kept and not tape.inner:
            saved = {at for n in read if n < len(tape.makers) for at in tape.sources(n, len(tape.nodes))}
            live = RecomputeSteps(tape, saved, kept).live
            kept = {at: value for at, value in kept.items() if at in live}
        self.needs = RecomputeSteps(tape, range(len(tape.nodes)), kept) if known is None else known.needs
        # The operands that the function writes to.
        arguments = enumerate(tape.outside[: tape.arguments])
        raw = {storage(tensor) for tensor, _ in self.raw}
        self.written = frozenset(
            at for at, known in arguments if known.root in recorder.snapshots or given[at].storage in raw
        )
        self.absent = may_be_absent(recorder, outs)
        self.kept = {at: recorder.kept[at] for at, runs in self.needs.live.items() if not runs}
        self.store = sent_away(self.kept, recorder, outs) if self.kept else None
        holds(self)

    def memories(self) -> Iterator[int]:
        """The storages of what it holds from outside."""
        yield from [g.storage for g in self.given.values() if g.memory() is not None]

    def lesson(self) -> PrimitiveTrace | None:
        """What this forward tells of the next call with the same signature, None if nothing."""
        tape = self.tape
        if (
            tape.loose
            or tape.meta
            or not tape.cacheable
            or self.needs.must_rerun
            or self.replaced
            or self.raw
        ):
            return None
        return PrimitiveTrace(tape, frozenset(self.kept), self.needs)

    def part(self) -> RecomputeSteps:
        """What a pull-back runs again."""
        if self.kept and (sound := but_written(self.kept, self.tape)) is not None:
            # The caller has written to a result that is kept. All operands are there: its op runs again.
            return RecomputeSteps(self.tape, range(len(self.tape.nodes)), sound)
        return self.needs

    def check_unwritten(self) -> None:
        """Raise when a tensor from outside that is read again was written to since the forward."""
        if self.tape.loose:
            return
        for given in self.given.values():
            tensor = given.ref()
            if given.snapshot is None and tensor is not None and version_of(tensor) != given.version:
                name = of_captured(self.region.function, tensor)
                raise RematError(written(f"region {self.region.name!r}", tensor, name))

    @contextmanager
    def surroundings(self, needs: RecomputeSteps) -> Iterator[None]:
        """Around a run of the function again: generators as they were, and what is kept on its way."""
        with ExitStack() as stack:
            unheld = self.region.name if self.tape.loose else None
            stack.enter_context(drawing_again(self.random, self.draws.values(), unheld))
            if self.replaced:
                stack.enter_context(data_again(self.replaced))
            if self.raw:
                stack.enter_context(lent(self.raw))
            if pairs := list(self._written()):
                stack.enter_context((lent if self.tape.loose else versions_again)(pairs))
            if self.store is not None:
                stack.enter_context(self.store.fetched({at for at, runs in needs.live.items() if not runs}))
            yield

    def _written(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """The memories from outside that the function writes to, as they were before."""
        for given in self.given.values():
            memory = given.memory() if given.snapshot is not None else None
            if memory is not None:
                tensor = given.ref()
                yield (octets(memory) if tensor is None else tensor), given.snapshot

    def replay(self, needs: RecomputeSteps, operands: Sequence[torch.Tensor]) -> Replay | None:
        """The mode under which the function runs again; None where its ops cannot be compared."""
        if self.tape.loose:
            return None
        check = self.region.determinism_check != "none"
        return Replay(
            self.tape,
            needs,
            self.kept,
            random=self.draws if self.region.preserve_rng_state else {},
            # The address of a memory that is gone is another's by now.
            snapshots=[
                (g.storage, g.snapshot)
                for g in self.given.values()
                if g.snapshot is not None and g.memory() is not None
            ],
            check=check,
            digest=self.region.digest,
            absent=self.absent,
            operands=self._operands(operands) if check and not self.replaced else None,
        )

    def _operands(self, operands: Sequence[torch.Tensor]) -> Operands:
        tape, given = self.tape, self.given
        written = {tape.outside[at].root for at, one in given.items() if one.snapshot is not None}
        living = ((at, one.there()) for at, one in given.items() if at >= tape.arguments)
        outside = {at: tensor for at, tensor in living if tensor is not None}
        return Operands(
            tape, operands[: tape.arguments], outside.get, written, functools.partial(untracked, same_numbers)
        )


def plain_checks(tape: Tape, needs: RecomputeSteps) -> list[Check | None]:
    """What ops are compared by that run again and are looked at no further, None for others."""
    of_ops = zip(tape.nodes, checks_of(tape), needs.actions, strict=True)
    return [
        check if check.count >= 0 and action == RUN and not (check.watched or node.digest) else None
        for node, check, action in of_ops
    ]


def may_be_absent(recorder: Recorder, outs: Sequence[torch.Tensor]) -> Callable[[], Absent]:
    """What a second run of the function may leave out, found when a run differs."""
    # (Not `number`: what is unknown by now is none of the tape, which an earlier call may have written.)
    tape, results = recorder.tape, {n for t in outs if (n := recorder.bound(t)) is not None}
    values = [(t, n) for t, n in recorder.living_values() if n >= 0]
    # Of what has a history only autocast's casts of leaves are handed from region to region.
    casts = {n for _, n in values if tape.nodes[tape.makers[n]].optional}
    living = [(n, weakref.ref(t), version_of(t)) for t, n in values if n in casts or not t.requires_grad]
    return functools.cache(lambda: Absent(tape, living, results))


# -- absent ----------------------------------------------------------------------------------------------
# Ops of a forward that a second run of the function may leave out.


Living = tuple[int, "weakref.ref[torch.Tensor]", int]


class Absent:
    """What may be left out, and what stands for it.

    There are two kinds. Copies and views that no op reads: autograd makes such for writes in place, where an
    operand is differentiated, and the run for one of several levels may differentiate less. And ops that do
    not depend on arguments, if somebody holds what came of them: a cache that the forward has filled (masks,
    rotary tables, samples). Who reads such a value in the second run must read the very tensor. And who reads
    the very tensor of another value, in place of the one made anew, reads what the first call has put by.

    Args:
        tape: of the forward.
        living: the values that were still there at its end: number, tensor and version.
        results: the numbers of the region's results.
    """

    def __init__(self, tape: Tape, living: Iterable[Living], results: set[int]) -> None:
        self.tape = tape
        # Under FSDP what brings parameters runs without gradients, and is no part of the sequence.
        filled = set[int]() if tape.sharded else _from_no_argument(tape)
        # A value may be there as several tensors: a region inside takes an alias of what it reads.
        self.held: dict[int, list[tuple[weakref.ref[torch.Tensor], int]]] = {}
        for number, ref, version in living:
            if ref() is not None:
                self.held.setdefault(number, []).append((ref, version))
        self.filled = filled if any(tape.makers[number] in filled for number in self.held) else set[int]()
        self.ops = self.filled | _unread_copies(tape, results)

    def stands_in(self, node: Node, args: Any, kwargs: Any, left: set[int], *, shapes: bool = False) -> bool:
        """Whether what an op reads of the ops that were `left` out is what they had made.

        `shapes`: and the rest has the shapes of the forward.
        """
        makers = self.tape.makers
        for number, value in pairs((node.args, node.kwargs), (args, kwargs)):
            if number >= 0 and makers[number] in left:
                if not self.is_held(number, value):
                    return False
            elif shapes and value.shape != self.tape.meta_of(number)[0]:
                return False
        return True

    def is_held(self, number: int, value: torch.Tensor) -> bool:
        """Whether it is what the forward has made and somebody holds, unwritten."""
        held = self.held.get(number, ())
        return any(ref() is value and version_of(value) == version for ref, version in held)

    def number_of(self, value: torch.Tensor) -> int | None:
        """The number of such a value, None if it is none."""
        return next((number for number in self.held if self.is_held(number, value)), None)


def _from_no_argument(tape: Tape) -> set[int]:
    found: set[int] = set()
    for i, node in enumerate(tape.nodes):
        facts = traits(node.op)
        # (Every draw is given the state of its own, so that one may be left out.)
        drawn = facts.may_draw and not (facts.random and node.draws)
        unknown = drawn or facts.outside or facts.higher_order
        given = any(at < tape.arguments for at in node.external)
        if not unknown and not given and found.issuperset(node.deps) and found.issuperset(node.written):
            found.add(i)
    return found


def _unread_copies(tape: Tape, results: set[int]) -> set[int]:
    read, found = {tape.makers[n] for n in results if n >= 0}, set[int]()
    for i, node in reversed(list(enumerate(tape.nodes))):
        if i not in read and (node.op is torch.ops.aten.clone.default or traits(node.op).view):
            found.add(i)
        else:
            read.update(node.deps)
    return found
