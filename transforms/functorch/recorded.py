"""The recorded forward of a primitive, and which of its ops a pull-back runs again.

The function itself runs again, under `torch.func` levels that need its history. An op whose result nobody
reads is skipped only where user code could not tell: its result was not stored anywhere, nor looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from remat.transforms.closure import of_captured
from remat.transforms.compat import (
    add_batch_dim,
    is_batched,
    is_wrapped,
    level_of,
    unwrap_batched,
    unwrap_once,
    unwrapped,
    wrap_for_grad,
)
from remat.transforms.context import quiet
from remat.transforms.errors import RematError
from remat.transforms.offload import Store, away_in
from remat.transforms.ops import traits
from remat.transforms.placeholders import hollow
from remat.transforms.region import Region
from remat.transforms.state import RandomState, generators_put_back
from remat.transforms.tape import (
    SKIP,
    Needs,
    Reachability,
    Recorder,
    Replay,
    Tape,
    lent,
    memory_of,
    metadata,
    metas,
    octets,
    storage,
    version_of,
    written,
)


class Recorded:
    """One settled forward.

    Args:
        region: whose forward.
        recorder: what watched it.
        packed: (op that made a value, autograd node that saved it); None where it is not known what the
            backward reads.
        saved: storages from outside that autograd itself reads.
        outs: the results, below all levels.
        random: the generators before the forward.
    """

    def __init__(
        self,
        region: Region,
        recorder: Recorder,
        packed: list[tuple[int, int]] | None,
        saved: set[int],
        outs: Sequence[torch.Tensor],
        random: RandomState | None,
    ) -> None:
        self.region, self.tape, self.random = region, recorder.tape, random
        self.draws, self.packed = recorder.random, packed or []
        self.reach: Reachability | None = None
        tape = self.tape
        everything = range(len(tape.nodes))
        if recorder.parent is not None:
            recorder.share_around()
        kept = {} if tape.loose else recorder.kept
        given = _let_go(recorder)
        if packed is not None and not tape.open:
            wanted = {made for made, _ in packed} | _must_run(tape)
            needs = Needs(tape, wanted, kept)
            if stored := _stored(recorder, needs, outs):
                needs = Needs(tape, wanted | stored, kept)
        else:
            needs = Needs(tape, everything, kept)
        if any(given[at].ref() is None for at in needs.outside if at >= tape.arguments):
            # Made inside, by something that is no op: what it read is unknown.
            tape.open = tape.open or "it reads a tensor that no op has made"
            needs = Needs(tape, everything, kept)
        self.needs = needs
        self.kept = {at: value for at, value in kept.items() if needs.live.get(at) is False}
        self.storages: set[int] | None = None  # of the operands that are read again; None for all
        if packed is not None and not needs.whole:
            self.storages = saved.union([given[at].storage for at in needs.outside])
        self.given = {
            at: g
            for at, g in enumerate(given)
            if at in needs.outside or g.storage in saved or g.snapshot is not None
        }
        self.store = self._sent(outs, recorder)

    def _sent(self, outs: Sequence[torch.Tensor], recorder: Recorder) -> Store | None:
        """Note what the forward sent to the host."""
        away = {at: value for at, value in self.kept.items() if any(True for _ in away_in(value))}
        if not away:
            return None
        # The caller may write to the results, into memory that is perhaps still being sent.
        roots = {recorder.root(t) for t in outs}
        for at, value in away.items():
            if self.tape.nodes[at].root in roots:
                for parcel in away_in(value):
                    parcel.parcel.wait()
        return Store(self.kept)

    def part(self, present: Sequence[int] | None) -> Needs:
        """What a pull-back from the results at `present` needs; None for all of them."""
        if self.reach is None or present is None or self.needs.whole:
            return self.needs
        idle = self.reach.idle_without(present)
        if not idle:
            return self.needs
        wanted = {made for made, owner in self.packed if owner not in idle} | _must_run(self.tape)
        return Needs(self.tape, wanted, self.kept)

    def check_unwritten(self) -> None:
        """Raise when a tensor from outside that is read again was written to since the forward."""
        if self.tape.loose:
            return
        for given in self.given.values():
            tensor = given.ref()
            if given.snapshot is None and tensor is not None and version_of(tensor) != given.version:
                function = self.region.function
                raise RematError(written(self.region.name, tensor, of_captured(function, tensor)))

    @contextmanager
    def surroundings(self, needs: Needs) -> Iterator[None]:
        """Around a run of the function again: generators as they were, and what is kept on its way."""
        with ExitStack() as stack:
            if self.random is not None:
                stack.callback(self.random.again().restore)
                self.random.restore()
                stack.enter_context(generators_put_back(self.draws.values()))
            if self.tape.loose:
                stack.enter_context(lent(self._written()))
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

    def replay(self, needs: Needs) -> Replay | None:
        """The mode under which the function runs again; None where its ops cannot be compared."""
        if self.tape.loose:
            return None
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
            check=self.region.determinism_check != "none",
            digest=self.region.digest,
        )


class _Given(NamedTuple):
    """A tensor from outside, held by whoever else holds it."""

    ref: weakref.ref[torch.Tensor]
    memory: weakref.ref[Any]  # which may outlive the tensor
    version: int
    storage: int
    snapshot: Any  # what its memory was before the region wrote to it, or None


def _let_go(recorder: Recorder) -> list[_Given]:
    """The tensors from outside; afterwards the recorder holds none of them."""
    snapshots, known = recorder.snapshots, recorder.tape.outside
    given = [
        _Given(
            weakref.ref(t), weakref.ref(memory_of(t) or t), version_of(t), storage(t), snapshots.get(o.root)
        )
        for t, o in zip(recorder.outside, known, strict=True)
    ]
    recorder.outside = []
    return given


def _must_run(tape: Tape) -> set[int]:
    """Ops that run although nobody reads them.

    Those of regions inside, which run a forward of their own; those that told user code something about
    data: what it does next may depend on it; those that fill what autograd has saved before; and those of
    sparse results, whose sizes depend on data and for which nothing can stand.
    """
    inner = {i for start, stop in tape.inner for i in range(start, stop)}
    return inner | {
        i
        for i, node in enumerate(tape.nodes)
        if (node.outs is not None and not metas(node.outs) and not node.written)
        or traits(node.op).saves_unwritten
        or any(stride is None for _, stride, *_ in metas(node.outs))
    }


def _stored(recorder: Recorder, needs: Needs, outs: Sequence[torch.Tensor]) -> set[int]:
    """Ops that nobody reads, with results that somebody holds, the region's own results aside."""
    tape = recorder.tape
    results = {recorder.number(t) for t in outs}
    return {
        tape.makers[number]
        for _, number in recorder.living_values()
        if number >= 0
        and number not in results
        and needs.actions[tape.makers[number]] == SKIP
        and not traits(tape.nodes[tape.makers[number]].op).view
    }


def hollow_operand(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with the same wrappers and metadata, and no memory: for operands that no backward reads."""
    if is_wrapped(tensor):
        level = level_of(tensor)
        if is_batched(tensor):
            inner, dim = unwrap_batched(tensor, level)
            return add_batch_dim(hollow_operand(inner), dim, level)
        return wrap_for_grad(hollow_operand(unwrap_once(tensor)), level)
    # A factory's result is wrapped by the level at hand.
    empty = unwrapped(quiet(hollow, metadata(tensor)))
    empty.untyped_storage().resize_(0)
    return empty
