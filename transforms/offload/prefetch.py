"""Which kept values a backward fetches from the host, and when: one region ahead of the one that it reads.

The backward meets regions in the reverse order of their forwards. When a region begins to read what it sent
away, the values of the forward that ended just before are fetched too. They arrive while the first region
computes.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Container, Iterator, Mapping
from typing import Any

from remat.transforms.compat import at_backward_end, graph_task
from remat.transforms.context import untracked
from remat.transforms.offload.transfer import Away, Parcel, away_in

# -- the order of forwards ----------------------------------------------------------------------------


class Place:
    """A forward's place in the order in which forwards ended, on one thread."""

    __slots__ = ("before", "store")

    def __init__(self, store: Store, before: Place | None) -> None:
        self.store = weakref.ref(store)
        self.before = before


class _Order(threading.local):
    last: Place | None = None


_order = _Order()


class Store:
    """What one forward of a region sent away; made when it ends.

    Args:
        kept: what is kept of ops, by their numbers. It is looked at anew each time, for values go as the
            backward lets go of them.
    """

    def __init__(self, kept: Mapping[int, Any]) -> None:
        self.kept = kept
        self.task = -1  # the backward pass that it was last read in
        self.open = False  # whether it is being read
        self.place = Place(self, _living(_order.last))
        _order.last = self.place

    def holds(self) -> bool:
        """Whether anything is still on the host."""
        return any(True for _ in self._aways(None))

    def fetch(self, needed: Container[int] | None = None) -> None:
        """Begin to bring back what is kept of the ops in `needed`, None for all."""
        takers: dict[Parcel, int] = {}
        for away in self._aways(needed):
            takers[away.parcel] = takers.get(away.parcel, 0) + 1
        for parcel, count in takers.items():
            parcel.fetch(count)

    def drop(self) -> None:
        """Let go of what was brought back and not asked for."""
        for away in self._aways(None):
            away.parcel.drop()

    def begin(self, needed: Container[int] | None) -> None:
        """A recomputation begins that asks for what is kept of the ops in `needed`."""
        self.task, self.open = graph_task(), True
        try:
            self.fetch(needed)
            _go_ahead(self)
        except BaseException:
            self.end()
            raise

    @contextlib.contextmanager
    def fetched(self, needed: Container[int] | None) -> Iterator[None]:
        """Around a recomputation that takes what is kept of these ops, None for all."""
        untracked(self.begin, needed)
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """The recomputation is over."""
        self.open = False
        self.drop()

    def _aways(self, needed: Container[int] | None) -> Iterator[Away]:
        for at, value in self.kept.items():
            if needed is None or at in needed:
                yield from away_in(value)


def _living(place: Place | None) -> Place | None:
    """The last place up to this one whose forward still has something on the host."""
    while place is not None:
        store = place.store()
        if store is not None and store.holds():
            return place
        place = place.before
    return None


# -- backward passes ----------------------------------------------------------------------------------


class _Pass:
    """A backward pass, and the one store that it has fetched from ahead of its turn."""

    ahead: weakref.ref[Store] | None = None

    def turn_to(self, store: Store | None) -> None:
        """Begin with `store`, None at the end: anything else that was fetched ahead was so in vain."""
        ahead = None if self.ahead is None else self.ahead()
        self.ahead = None
        if ahead is not None and ahead is not store and not ahead.open:
            ahead.drop()


_passes: dict[int, _Pass] = {}


class _End:
    """Ends a pass when the engine says so, or when the engine, after an exception, forgets it."""

    __slots__ = ("task",)

    def __init__(self, task: int) -> None:
        self.task = task

    def __call__(self) -> None:
        if (ended := _passes.pop(self.task, None)) is not None:
            ended.turn_to(None)

    __del__ = __call__


def _go_ahead(store: Store) -> None:
    """Now that a backward reads from `store`, begin to fetch what it will read next."""
    task = store.task
    if task == -1:
        return
    if task not in _passes:
        _passes[task] = _Pass()
        at_backward_end(_End(task))
    running = _passes[task]
    running.turn_to(store)
    store.place.before = place = _living(store.place.before)
    following = None if place is None else place.store()
    # Where the one before has had its turn in this pass, so has what lies before that.
    if following is not None and not following.open and following.task != task:
        running.ahead = weakref.ref(following)
        following.fetch()
