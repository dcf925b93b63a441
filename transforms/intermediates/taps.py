"""Taps: what `capture` and `capture_grads` put where a value gets its name.

`tap(name, tree)` hands a named tree to the sessions open on this thread and returns it, perhaps changed. A
region under functorch levels runs below them. There a value can leave only as a result and enter only as an
operand. So each session is replaced by a mirror, and the region passes on what that found.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from remat.transforms.compat import (
    VMAP,
    add_batch_dim,
    depth,
    graph_task,
    interpreter,
    unwrap_batched,
    unwrap_for_grad,
)
from remat.transforms.context import active, scoped, untracked, without_policy
from remat.transforms.errors import RematError
from remat.transforms.objects import is_tensor
from remat.transforms.pytree import flatten, map_only, smooth, unflatten


class Session:
    """Receives named values; open from `only` or `opened` to its end.

    Attributes:
        wanted: the names it asks for.
        seen: every name that was given.
    """

    graph = False  # whether the nodes of a compiler's graph give to it, instead of `tap`

    def __init__(self, wanted: frozenset[str]) -> None:
        self.wanted = wanted
        self.seen: set[str] = set()
        self.depth = depth()
        # What runs in a backward that began after the session opened is a recomputation, not the function.
        self.task = graph_task()

    def give(self, name: str, tree: Any) -> Any:
        self.seen.add(name)
        return self.take(name, tree) if name in self.wanted else tree

    def take(self, name: str, tree: Any) -> Any:
        raise NotImplementedError


class Values(Session):
    """Collects named values."""

    def __init__(self, wanted: frozenset[str]) -> None:
        super().__init__(wanted)
        self.found: list[tuple[str, Any]] = []

    def take(self, name: str, tree: Any) -> Any:
        self.found.append((name, map_only(torch.Tensor, lambda t: lifted(t, self.depth), tree)))
        return tree


class Refusal(Session):
    """Stands where values can neither leave nor enter."""

    def __init__(self, wanted: frozenset[str], where: str) -> None:
        super().__init__(wanted)
        self.where = where

    def take(self, name: str, tree: Any) -> Any:
        raise RematError(
            f"capture: the name {name!r} is given inside {self.where}, whose steps cannot be looked into "
            "from outside. Return the value among the ys of the body."
        )


class Given(Session):
    """Adds an offset to every floating point or complex tensor that is named: the handle to its gradient.

    Args:
        wanted: the names.
        offsets: one for each tensor, in the order of the function, at the session's own level.
    """

    def __init__(
        self, wanted: frozenset[str], offsets: Sequence[torch.Tensor] = (), graph: bool = False
    ) -> None:
        super().__init__(wanted)
        self.offsets = list(offsets)
        self.graph = graph
        self.at = 0

    def take(self, name: str, tree: Any) -> Any:
        return map_only(torch.Tensor, self._moved, tree)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if not smooth(tensor):
            return tensor
        self.at += 1
        return without_policy(torch.add, tensor, raised(self.offsets[self.at - 1], self.depth))

    def here(self, start: int) -> list[torch.Tensor]:
        """The offsets from `start` on that were used, at the present levels."""
        return [raised(t, self.depth) for t in self.offsets[start : self.at]]

    def since(self, mark: int) -> Given:
        """What stands in for it where the function runs again from a point at which `at` was `mark`."""
        return Given(self.wanted, self.offsets[mark:], self.graph)


class Perturbations(Given):
    """The same with offsets that it makes when it meets a tensor.

    Args:
        wanted: the names.
        make: the offset for a tensor, at the session's own level.
    """

    def __init__(
        self, wanted: frozenset[str], make: Callable[[torch.Tensor], torch.Tensor], graph: bool = False
    ) -> None:
        super().__init__(wanted, graph=graph)
        self.make = make
        self.found: list[tuple[str, Any]] = []  # trees of offsets, at the session's own level

    def take(self, name: str, tree: Any) -> Any:
        leaves, spec = flatten(tree)
        self.found.append((name, unflatten([self._offset(leaf) for leaf in leaves], spec)))
        return super().take(name, tree)

    def _offset(self, leaf: Any) -> Any:
        if not smooth(leaf):
            return None if is_tensor(leaf) else leaf
        own = lifted(leaf, self.depth, lambda tensor: untracked(self.make, tensor))
        self.offsets.append(own)
        return own


# -- the sessions of this thread ----------------------------------------------------------------------


def current() -> tuple[Session, ...]:
    """The open sessions, outermost first, but for those that a running backward does not concern."""
    sessions = active.sessions
    if not sessions:
        return ()
    task = graph_task()
    return tuple([session for session in sessions if session.task == task])


def only(sessions: Sequence[Session]) -> contextlib.AbstractContextManager[None]:
    """Let these be the open sessions for a while."""
    return scoped(sessions=tuple(sessions))


def opened(session: Session) -> contextlib.AbstractContextManager[None]:
    """Add a session."""
    return only((*active.sessions, session))


def tap(name: str, tree: Any, graph: bool = False) -> Any:
    """Give a named tree to the open sessions; those of graphs or those of the user's code."""
    # From the outermost: what an inner function collects is used outside of it, with the outer offset.
    for session in current():
        if session.graph == graph:
            tree = session.give(name, tree)
    return tree


# -- in a region --------------------------------------------------------------------------------------

Marks = tuple[tuple[Given, int], ...]


def marks() -> Marks:
    """Where the open sessions stand, for a recomputation of what runs next."""
    if not active.sessions:
        return ()
    # Not those that collect: their values lead back, through autograd's graph, to whoever holds the marks.
    return tuple([(session, session.at) for session in current() if isinstance(session, Given)])


@contextlib.contextmanager
def again(start: Marks) -> Iterator[None]:
    """The sessions of a recomputation: it adds the same offsets, and nobody collects from it."""
    if not start and not active.sessions:
        yield
        return
    with only([session.since(mark) for session, mark in start]):
        yield


class Mirrors:
    """The open sessions as a region below their levels can serve them.

    Args:
        dry_run: runs the region's function at the present levels, for the shapes of the offsets it needs.

    Attributes:
        offsets: the region's further operands.
    """

    def __init__(self, dry_run: Callable[[], Any]) -> None:
        self.sessions = current()
        self.makers = [_mirrored(session, dry_run) for session in self.sessions]
        self.offsets = [t for make in self.makers for t in getattr(make(), "offsets", ())]
        self.names: list[list[str]] = []
        self.seen: list[set[str]] = []

    def opened(
        self, operands: dict[int, torch.Tensor]
    ) -> tuple[contextlib.AbstractContextManager[None], list[Session]]:
        """Fresh mirrors for one run of the region's body, in which `operands` stand for the offsets."""
        made = [make() for make in self.makers]
        for session in made:
            if isinstance(session, Given):
                session.offsets = [operands[id(t)] for t in session.offsets]
        return only(made), made

    def found(self, made: list[Session]) -> list[Any]:
        """The trees that the mirrors collected; as results they leave the region."""
        pairs = [getattr(session, "found", ()) for session in made]
        self.names = [[name for name, _ in found] for found in pairs]
        self.seen = [session.seen for session in made]
        return [[tree for _, tree in found] for found in pairs]

    def pass_on(self, trees: list[Any]) -> None:
        """Give what left the region to the sessions themselves."""
        for session, names, found, seen in zip(self.sessions, self.names, trees, self.seen, strict=True):
            session.seen |= seen
            for name, tree in zip(names, found, strict=True):
                session.give(name, tree)
        # The region's node in autograd's graph holds the mirrors; they must not hold its results.
        self.sessions = ()


def _mirrored(session: Session, dry_run: Callable[[], Any]) -> Callable[[], Session]:
    if isinstance(session, Refusal):
        return functools.partial(Refusal, session.wanted, session.where)
    if not isinstance(session, Given):
        return functools.partial(Values, session.wanted)
    start = session.at
    with only([session]):
        dry_run()
    return functools.partial(Given, session.wanted, session.here(start), session.graph)


class Handed:
    """The open sessions of a graph, as a region of that graph can serve them.

    Args:
        named: for each value that the region names, in order, the name and an example of its metadata.

    Attributes:
        offsets: the region's further operands.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.offsets: list[torch.Tensor] = []
        self.counts: list[tuple[frozenset[str], int]] = []
        for session in current():
            if isinstance(session, Given) and session.graph:
                start = session.at
                for name, example in named:
                    # All that becomes of it is an offset of its shape, at the session's level.
                    kind = {"dtype": example.dtype, "device": example.device}
                    with scoped(untracked=True):
                        session.give(name, torch.empty(example.shape, **kind))
                self.offsets += session.here(start)
                self.counts.append((session.wanted, session.at - start))

    def opened(self, offsets: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        """Sessions for one run of the region's body, which got `offsets` as operands."""
        made, rest = [], list(offsets)
        for wanted, count in self.counts:
            made.append(Given(wanted, rest[:count], graph=True))
            del rest[:count]
        return only(made)


# -- levels -------------------------------------------------------------------------------------------


def lifted(tensor: torch.Tensor, depth: int, then: Callable[[torch.Tensor], Any] = lambda t: t) -> Any:
    """`then`, called at `depth`, of `tensor` without the deeper levels; a vmap's batch comes to the front."""
    level = interpreter()
    if level is None or level.level() <= depth:
        return then(tensor)
    if level.key() != VMAP:
        inner = unwrap_for_grad(tensor, level.level())
        with level.lower():
            return lifted(inner, depth, then)
    (inner, dim), size = unwrap_batched(tensor, level.level()), level.batch_size()
    with level.lower():
        if dim is None:
            return lifted(untracked(inner.expand, size, *inner.shape), depth, then)
        return lifted(untracked(inner.movedim, dim, 0), depth, then)


def raised(tensor: torch.Tensor, depth: int) -> torch.Tensor:
    """What `lifted` brought to `depth`, at the present levels again."""
    level = interpreter()
    if level is None or level.level() <= depth:
        return tensor
    with level.lower():
        inner = raised(tensor, depth)
    return add_batch_dim(inner, 0, level.level()) if level.key() == VMAP else inner
