"""What a recomputation starts from: kept values, and memory from outside as it was before a write."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from remat.transforms.closure import StrayWatch
from remat.transforms.compat import (
    at_backward_end,
    autograd_again,
    data_of,
    graph_task,
    memory_is_real,
    set_data,
    set_version,
    uncompiled,
    version_kept,
)
from remat.transforms.context import active, beyond_regions, numbered, numbered_again, packed_by, untracked
from remat.transforms.errors import RematError, written
from remat.transforms.offload import Elsewhere, Store, away_in
from remat.transforms.ops import (
    address,
    hands_out,
    has_strides,
    lying_as,
    memory_of,
    metadata,
    octets,
    storage,
    targets,
    traits,
    version_of,
)
from remat.transforms.pytree import flatten
from remat.transforms.state import GeneratorState, state_before
from remat.transforms.tape.tape import Tape, map_tensors


class Held(Elsewhere):
    """A value of a region, held until the backward.

    Args:
        tensor: the value.
        watched: a tensor in the same memory that the caller has, and may write to.
        region: the name of the region.
        hooks: the user's saved-tensor hooks, which it goes through as autograd's own saved values do.

    Attributes:
        known: under which numbers the recordings around know it, where it goes through hooks.
        takers: how many regions keep it. Hooks such as those of torch's checkpoint give it once a pass.
    """

    __slots__ = (
        "_fetched", "_left", "_task",
        "hooks", "known", "meta", "packed", "region", "takers", "version", "watched",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor, region: str, hooks: Any, watched: Any = None) -> None:
        # No op of a region around: it would meet an alias that no op of its own has made.
        plain = untracked(tensor.detach)
        self.region, self.hooks = region, hooks
        self.takers, self._left, self._task = 1, 0, -1
        self._fetched: torch.Tensor | None = None
        self.packed: Any = plain if hooks is None else packed_by(hooks[0], plain)
        self.watched: Any = None
        if hooks is None or hands_out(self.packed, plain):
            # What is made below autograd, as by a recorder, has a version of its own.
            self.watched = plain if watched is None else untracked(watched.detach)
            self.version = version_of(self.watched)
        self.known = () if hooks is None else numbered(tensor)
        self.meta = None if hooks is None else metadata(plain)

    @property
    def unwritten(self) -> bool:
        """Whether nobody has written to it since, as far as is known here."""
        return self.watched is None or version_of(self.watched) == self.version

    def get(self, alone: bool = False) -> torch.Tensor:
        """The value again; if `alone`, in memory of its own."""
        if not self.unwritten:
            raise RematError(written(f"region {self.region!r}", self.watched))
        value = self.packed if self.hooks is None else self._fetch()
        # A new tensor object each time: autograd writes its own record on it.
        return value.clone() if alone else value.detach()

    def _fetch(self) -> torch.Tensor:
        """What the hooks give, held until all regions have taken it in this pass."""
        value, task = self._fetched, graph_task()
        if value is None or task == -1 or task != self._task:
            with autograd_again():
                value = untracked(lying_as, beyond_regions(self.hooks[1], self.packed), self.meta)
            numbered_again(value, self.known)
            self._task, self._left = task, self.takers
        self._left -= 1
        self._fetched = value if self._left > 0 else None
        if active.stack and task != -1:
            # A backward inside of a forward: which regions take it is known when that is over.
            self._fetched = value
            at_backward_end(self._let_go)
        return value

    @uncompiled
    def _let_go(self) -> None:
        self._fetched = None


def held_values(
    kept: dict[int, Any],
    region: str,
    results: Iterable[tuple[torch.Tensor, torch.Tensor]],
    hooks: Any = None,
) -> dict[int, Any]:
    """What is kept of ops, to be held until the backward; `results`: what the caller gets, and for each the
    wrapper around it, which is itself where there is none."""
    seen = {storage(tensor): around for tensor, around in results}

    def hold(value: Any) -> Any:
        if isinstance(value, Elsewhere):
            if isinstance(value, Held):
                value.takers += 1
            return value
        return Held(value, region, hooks, seen.get(storage(value)))

    return {at: map_tensors(hold, value) for at, value in kept.items()}


def but_written(kept: dict[int, Any], tape: Tape) -> dict[int, Any] | None:
    """The kept values without those that somebody has written to and that may be made again, None if there is
    none of these. What was drawn or decided is not made again: it might come out otherwise."""
    written = {
        at
        for at, value in kept.items()
        if not (tape.nodes[at].draws or at in tape.decided)
        and not all([getattr(held, "unwritten", True) for held in flatten(value)[0]])
    }
    return {at: value for at, value in kept.items() if at not in written} if written else None


def sent_away(kept: dict[int, Any], recorder: Any, results: Iterable[torch.Tensor]) -> Store | None:
    """What of the kept values is on its way to the host, None for nothing; `results`: what the caller gets.

    The caller may write to the results, into memory that is perhaps still being sent. An alias that autograd
    made of something, which has no number, may be of anything.
    """
    away = {at: value for at, value in kept.items() if any(True for _ in away_in(value))}
    if not away:
        return None
    tape, numbers = recorder.tape, list(map(recorder.bound, results))
    lie = {tape.root_of(number) for number in numbers if number is not None}
    for at, value in away.items():
        if None in numbers or tape.nodes[at].root in lie:
            for parcel in away_in(value):
                parcel.parcel.wait()
    return Store(kept)


def handed_out(kept: Any, copied: bool) -> Any:
    """What was kept of an op, for its recomputation; `copied` where that writes to it."""

    def fresh(value: Any) -> torch.Tensor:
        if isinstance(value, Elsewhere):
            return value.get(alone=copied)  # pyright: ignore[reportAttributeAccessIssue]
        # A new tensor object each time: autograd writes its own record on it.
        return value.clone() if copied else value.detach()

    return map_tensors(fresh, kept)


class Snapshot:
    """A copy of the memory of a tensor: all of it, so that every view of it can be had again.

    `unread`: it is about to be written over as a whole, and nothing has read it. Then only its size is noted.
    """

    __slots__ = ("layout", "memory", "size", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, unread: bool = False) -> None:
        self.version, self.layout = version_of(tensor), _lies(tensor)
        self.size: tuple[int, torch.device] | None = None
        memory = memory_of(tensor) if _has_memory(type(tensor)) else None
        if unread and memory is not None:
            self.memory, self.tensor, self.size = None, None, (memory.nbytes(), memory.device)
        elif memory is None or tensor.is_meta or not memory_is_real():
            self.memory, self.tensor = None, tensor.detach().clone()
        else:
            self.memory, self.tensor = memory.clone(), None

    def copy(self) -> Snapshot:
        """Another one, to be written to."""
        made = Snapshot.__new__(Snapshot)
        made.version, made.layout, made.size = self.version, self.layout, None
        made.memory = self._empty() if self.memory is None else self.memory.clone()
        made.tensor = None if self.tensor is None else self.tensor.clone()
        return made

    def _empty(self) -> torch.UntypedStorage | None:
        """Memory of the size, where that is all that is known."""
        return None if self.size is None else torch.UntypedStorage(self.size[0], device=self.size[1])

    @property
    def place(self) -> Any:
        """The memory of the copy."""
        if self.size is not None:
            return self._empty()
        return self.memory if self.tensor is None else memory_of(self.tensor)

    def differs(self, tensor: torch.Tensor) -> bool:
        """Whether something else lies in the memory of `tensor` now."""
        if self.size is not None:
            return True
        memory = memory_of(tensor)
        if self.memory is None or memory is None or memory.nbytes() != self.memory.nbytes():
            return False
        return not torch.equal(octets(memory), octets(self.memory))

    def restore_state(self, tensor: torch.Tensor) -> None:
        """Let the memory of `tensor` hold what it held."""
        if self.size is not None:
            return
        memory = memory_of(tensor)
        if memory is None or self.memory is None:
            tensor.detach().copy_(self.view(tensor))
        else:
            memory.copy_(self.memory)

    def undo(self, tensor: torch.Tensor) -> None:
        """The same by an op, which regions around count as one of theirs: the memory is written to again."""
        if self.size is not None:
            return
        memory, whole = memory_of(tensor), untracked(tensor.detach)
        if memory is not None and self.memory is not None:
            size = memory.nbytes() // tensor.element_size()
            whole = untracked(torch.as_strided, whole, (size,), (1,), 0)
        whole.copy_(untracked(self.view, whole))

    def view(self, like: torch.Tensor) -> torch.Tensor:
        """What `like`, a tensor in the memory that was copied, was."""
        if self.memory is None:
            assert self.tensor is not None
            # Without data a view of another part is as good as any other of its shape.
            return self.tensor if _lies(like) == self.layout else torch.empty_like(like)
        empty = torch.empty(0, dtype=like.dtype, device=like.device)
        there = memory_of(like)
        if there is not None and self.layout is not None and self.memory.nbytes() < there.nbytes():
            # An op has resized it since, as observers of quantization do, and resizes this copy again.
            return empty.set_(self.memory.clone(), *self.layout)
        return empty.set_(self.memory, like.storage_offset(), like.shape, like.stride())

    def tensors(self) -> list[torch.Tensor]:
        """What is held, for reports."""
        if self.memory is None:
            return [] if self.tensor is None else [self.tensor]
        return [octets(self.memory)]


def _has_memory(kind: type) -> bool:
    """Whether tensors of a class are memory, as torch's own; one with its own dispatch may wrap others."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def _lies(tensor: torch.Tensor) -> Any:
    return (tensor.storage_offset(), tensor.shape, tensor.stride()) if has_strides(tensor) else None


class Contents:
    """What lies in a memory of a region's own that others may fill past torch: samplers, NumPy, raw kernels.

    Attributes:
        known: its numbers, as far as ops tell; None where nothing has told of any.
        shown: whether user code has looked at it.
    """

    __slots__ = ("_memory", "known", "shown")

    def __init__(self, memory: torch.UntypedStorage, filled: bool, shown: bool) -> None:
        self._memory, self.shown = weakref.ref(memory), shown
        self.known = memory.clone() if filled else None

    def now(self) -> torch.UntypedStorage | None:
        """The memory, None where its numbers are known, or nobody has it any more."""
        memory = self._memory()
        if memory is None or (self.known is not None and torch.equal(octets(memory), octets(self.known))):
            return None
        return memory

    def written(self) -> bool:
        """An op has written to it; whether others may still fill it unseen."""
        if self.known is not None and (memory := self._memory()) is not None:
            self.known = memory.clone()
        return self.shown


def memory_around(known: Iterable[Any], tensor: torch.Tensor) -> tuple[Any, int]:
    """The known memory in which `tensor` lies, and where, though its storage is another.

    DLPack and extensions make storages of their own around memory that they are given.
    """
    memory = memory_of(tensor)
    if memory is None or type(tensor) is not torch.Tensor or not tensor.numel() or not memory_is_real():
        return None, 0
    if (first := address(memory)) is None:
        return None, 0
    first += int(tensor.storage_offset()) * tensor.element_size()
    for entry in known:
        there = entry[0]() if entry[1] >= 0 else None
        if there is None or there.device != memory.device or (start := address(there)) is None:
            continue
        if start <= first < start + there.nbytes():
            return entry, (first - start) // tensor.element_size()
    return None, 0


class WriteNotes(StrayWatch):
    """Around a forward that nobody records: memory from outside as it was before writes."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__(known)
        self.operands, self.asked = known, 0
        self.memories: set[int] = set()  # of what is from outside, as far as a write has asked
        self.before: dict[int, tuple[torch.Tensor, Snapshot]] = {}
        self.random: list[GeneratorState] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            self.random.append(untracked(state_before, args, kwargs))
        for tensor in targets(traits(func), args, kwargs):
            key = storage(tensor)
            if key not in self.before and self._is_outside(tensor, key):
                self.before[key] = tensor, untracked(Snapshot, tensor)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _is_outside(self, tensor: torch.Tensor, key: int) -> bool:
        # Each is looked at once: a function may write by thousands of slices.
        self.memories.update(map(storage, (*self.operands, *self.outside[self.asked :])))
        self.operands, self.asked = (), len(self.outside)
        return not self.knows(tensor) or key in self.memories

    def restore_state(self) -> None:
        """Let memory from outside and generators be as before: the run was broken off, and begins again."""
        for state in reversed(self.random):
            state.restore()
        for tensor, before in self.before.values():
            before.undo(tensor)


@contextlib.contextmanager
def versions_again(pairs: Iterable[tuple[torch.Tensor, Snapshot]]) -> Iterator[None]:
    """Within, writes are counted from where they were before the region's; afterwards tensors count as now.

    What an op of a run saves for a derivative of that run has the version that it had in the forward.
    """
    with contextlib.ExitStack() as stack:
        for tensor, before in pairs:
            if not tensor.is_inference():
                stack.enter_context(version_kept(tensor))
                set_version(tensor, before.version)
        yield


@contextlib.contextmanager
def data_again(pairs: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> Iterator[None]:
    """Within, tensors have the memory that they had before a region gave them other, and afterwards what they
    have now. None: the function gives them some before it reads any."""
    with contextlib.ExitStack() as stack:
        for tensor, before in pairs:
            stack.callback(set_data, tensor, data_of(tensor))
            if before is not None:
                set_data(tensor, before)
        yield


@contextlib.contextmanager
def freed_again(pairs: Iterable[tuple[torch.UntypedStorage, Any]]) -> Iterator[None]:
    """Within, memories from outside that a region frees and fills are as it has found them, for a run that
    does so again; afterwards they are as now."""
    with contextlib.ExitStack() as stack:
        for memory, known in pairs:
            stack.callback(_refill, memory, memory.nbytes(), memory.clone() if memory.nbytes() else None)
            if known.before is not None:
                _refill(memory, known.before.place.nbytes(), known.before.place)
            elif known.size == 0:
                memory.resize_(0)
        yield


def _refill(memory: torch.UntypedStorage, size: int, content: torch.UntypedStorage | None) -> None:
    if memory.nbytes() != size:
        memory.resize_(size)
    if content is not None:
        memory.copy_(content)


@contextlib.contextmanager
def lent(pairs: Iterable[tuple[torch.Tensor, Snapshot]]) -> Iterator[None]:
    """Within, tensors hold what they held before a region wrote to them, for a run that writes to them again.

    Where no mode gives the run scratch copies instead: writes are raw ones, or ops cannot be compared.
    Afterwards they hold what they hold now, and their versions tell nobody.
    """
    with contextlib.ExitStack() as stack:
        for tensor, before in pairs:
            stack.enter_context(version_kept(tensor))
            stack.callback(untracked, untracked(Snapshot, tensor).restore_state, tensor)
            untracked(before.restore_state, tensor)
            set_version(tensor, before.version)
        yield
