"""Copies between a device and the host, and values that lie in host memory between forward and backward.

Copies run on a stream beside the one that computes (`StreamLane`). On a device without streams, the CPU among
them, copies are made there and then and in the same order: who decides what travels knows nothing of streams.
Regions (`Parcel`), scans and the graphs of compilers all copy in this way. Host memory is pinned. Torch's
allocator of pinned memory keeps freed memory and hands it out again, so a step like the one before it
allocates none.

PyTorch's own `torch.autograd.graph.save_on_cpu` copies on the computing stream; torchtune's
`OffloadActivations` has a side stream and sends one tensor after another, without knowing of regions.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat.transforms.compat import (
    at_backward_end,
    bits,
    graph_task,
    memory_is_real,
    storage_key,
    uncompiled,
    with_bits,
)
from remat.transforms.context import scoped, untracked
from remat.transforms.errors import RematError, written
from remat.transforms.ops import memory_of, span, tensors_in, version_of

# The name of a region's arguments that belong on the host.
INPUT = "remat.input"


class Lane:
    """Copies between a device without streams of its own and the host.

    `send` and `fetch` return the copy with a mark that says when it is there; whoever reads the copy, or
    writes to what it was made of, calls `arrived` or `wait` first.
    """

    def send(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        """A copy in host memory, in the tensor `into` if there is one."""
        if into is None:
            # Tensors on the meta device have nothing to send, and are no smaller elsewhere.
            device = tensor.device if tensor.is_meta else "cpu"
            into = torch.empty_like(tensor, device=device, pin_memory=pinned_for(tensor, tensor.device))
        return into.copy_(tensor), None

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, made where the device computes: what it computes next comes after."""
        return self.send(tensor)[0]

    def fetch(self, host: torch.Tensor, into: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy of a tensor that was sent, on the device in the tensor `into`."""
        return into.copy_(host), None

    def finish(self) -> None:
        """Have the host wait for all that was asked for, so that it may read what was sent."""

    def wait(self, mark: Any) -> None:
        """Let what is computed from now on come after the copy that has this mark."""

    def arrived(self, tensor: torch.Tensor, mark: Any) -> torch.Tensor:
        """A tensor that was fetched, to be computed with from now on."""
        return tensor


class StreamLane(Lane):
    """Copies on a stream of their own, to and from pinned memory, beside what the device computes.

    A copy in either direction begins when the computing stream is done with what it was given so far. A value
    that is sent has been made by then, and a fetched value goes into memory that is no longer in use. So what
    is fetched is an ordinary tensor of the computing stream's memory. It is fetched no sooner than planned,
    however far the host runs ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device)

    def send(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True) if into is None else into
        return host, self._copy(host, tensor, tensor)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def fetch(self, host: torch.Tensor, into: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return into, self._copy(into, host, into)

    def finish(self) -> None:
        self.stream.synchronize()

    def _copy(self, to: torch.Tensor, source: torch.Tensor, on_device: torch.Tensor) -> Any:
        self.stream.wait_stream(torch.accelerator.current_stream(on_device.device))
        with self.stream:
            to.copy_(source, non_blocking=True)
            mark = self.stream.record_event()
        # Its memory may be let go of at any time, and is then not used anew before the copy is through. (For
        # the pinned memory the copy itself sees to that.)
        on_device.record_stream(self.stream)
        return mark

    def wait(self, mark: Any) -> None:
        torch.accelerator.current_stream(self.stream.device).wait_event(mark)

    def arrived(self, tensor: torch.Tensor, mark: Any) -> torch.Tensor:
        here = torch.accelerator.current_stream(tensor.device)
        here.wait_event(mark)
        # The stream that asked for it need not be the one that reads it.
        tensor.record_stream(here)
        return tensor


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_at_once = Lane()
_lanes: dict[torch.device, Lane] = {}


def lane(tensor: torch.Tensor, device: torch.device | None = None) -> Lane:
    """How this tensor travels to the host, or from there to `device`."""
    kind, device = torch.accelerator.current_accelerator(), device or tensor.device
    if kind is None or device.type != kind.type or not memory_is_real():
        return _at_once
    if type(tensor) not in _PLAIN:
        # A subclass need not know of streams.
        return _at_once
    if device not in _lanes:
        _lanes[device] = StreamLane(device)
    return _lanes[device]


def pinned_for(like: torch.Tensor, device: torch.device) -> bool:
    """Whether such a tensor, sent from `device`, goes to pinned memory."""
    # A subclass need not know of that.
    return device.type not in ("cpu", "meta") and (type(like) in _PLAIN or not memory_is_real())


class Copy(NamedTuple):
    """A copy that is on its way."""

    tensor: torch.Tensor
    lane: Lane
    mark: Any

    def arrived(self) -> torch.Tensor:
        """The copy on its device, to be computed with from now on."""
        return self.lane.arrived(self.tensor, self.mark)

    def wait(self) -> None:
        """Let what is computed from now on write to what was copied."""
        self.lane.wait(self.mark)


def to_host(tensor: torch.Tensor, into: torch.Tensor | None = None) -> Copy:
    """Begin to copy a tensor to host memory, that of `into` if there is one."""
    # Conjugates are made on the device: the host would do so as soon as the copy was asked for.
    tensor = tensor.resolve_conj().resolve_neg()
    by = lane(tensor)
    try:
        with scoped(travelling="host"):
            copy, mark = by.send(tensor, into)
    except RuntimeError as error:
        raise RematError(
            f"there is no room in host memory for {tensor.nbytes} bytes that a region offloads: {error}. "
            "Offload less, by a policy for fewer values, or raise the limit of pinned memory (ulimit -l)."
        ) from error
    return Copy(copy, by, mark)


def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, made where the device computes: what it computes next comes after the copy.

    For graphs of compilers, which give the value's memory to the next kernel that asks. So nothing could run
    beside the copy, and the memory of a CUDA graph takes no marks of other streams.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    with scoped(travelling="host"):
        return lane(tensor).copied(tensor)


def to_device(host: torch.Tensor, device: torch.device, stride: Any = None) -> Copy:
    """Begin to copy a tensor that was sent from `device` back, once it has come to the host; `stride` has its
    gaps, if it had any."""
    by = lane(host, device)
    with scoped(travelling="device"):
        if stride is None:
            into = torch.empty_like(host, device=device)
        else:
            into = host.new_empty_strided(host.shape, stride, device=device)
        copy, mark = by.fetch(host, into)
    return Copy(copy, by, mark)


class Parcel:
    """One tensor that was sent to the host, and while the backward needs it its copy on the device."""

    __slots__ = (
        "__weakref__",
        "bits",
        "device",
        "fetched",
        "host",
        "offset",
        "sent",
        "source",
        "stride",
        "takers",
        "storage",
        "version",
        "watched",
    )

    def __init__(self, tensor: torch.Tensor, source: torch.Tensor | None = None) -> None:
        """`source`: what a region was given, of which `tensor` is a view. It leaves when the next one that
        has a source is made, so the last of a pass is never sent."""
        # What travels is memory: that its numbers stand for their conjugates is noted beside it.
        self.bits = bits(tensor)
        tensor = with_bits(tensor.detach(), self.bits)
        self.device = tensor.device
        self.sent: Copy | None = None
        # Whether the source was written to only it can tell: views made below autograd have other versions.
        self.host, self.watched = tensor, tensor if source is None else source
        self.version = version_of(self.watched)
        self.source = None if source is None else weakref.ref(source)
        # Where it lay, for views of it.
        self.offset, self.stride = tensor.storage_offset(), tensor.stride()
        self.fetched: Copy | None = None
        self.takers = 0  # how many values will still be asked for of what was fetched
        if source is not None:
            _queue.add(self)
        else:
            self.leave()

    def leave(self) -> None:
        """Send it, unless it was sent or written to since."""
        if self.sent is None and version_of(self.watched) == self.version:
            self.sent = to_host(self.host)
            self.host = self.watched = self.sent.tensor

    def covers(self, view: torch.Tensor) -> bool:
        """Whether `view`, which looks into the same memory, is a part of it, laid out in the same way."""
        plain = type(view) is torch.Tensor and view.layout is torch.strided
        if not plain or view.dtype is not self.host.dtype or self.host.stride() != self.stride:
            return False
        start, size = view.storage_offset() - self.offset, self.host.untyped_storage().nbytes()
        return start >= 0 and (start + span(view.shape, view.stride())) * view.element_size() <= size

    def wait(self) -> None:
        """Let what is computed from now on write to the tensor that was sent."""
        self.leave()
        if self.sent is not None:
            self.sent.wait()

    def fetch(self, takers: int) -> None:
        """Begin to bring it back for so many values."""
        self.takers = takers
        if self.fetched is None and self.sent is not None:
            self.fetched = self._coming()

    def take(self) -> torch.Tensor:
        """What was sent on its device, fetched now if it was not before."""
        # What is written to after it was sent may be written to before the copy has been made.
        now = self.watched if self.sent is None else self.source and self.source()
        if now is not None and version_of(now) != self.version:
            raise RematError(written("a region with inputs='offload'", now))
        if self.sent is None:
            return self.host
        fetched = self.fetched or self._coming()
        self.takers -= 1
        if self.takers <= 0:
            self.fetched = None
        return fetched.arrived()

    def _coming(self) -> Copy:
        # Kernels add in another order where a tensor lies otherwise. What was expanded comes without gaps.
        kept = type(self.host) not in _PLAIN or 0 in self.stride or self.stride == self.host.stride()
        return to_device(self.host, self.device, None if kept else self.stride)

    def drop(self) -> None:
        """Let go of the copy on the device."""
        self.fetched = None


class _Queue(threading.local):
    """The one parcel of a thread that waits, and those that were sent last: `most` are on the way at most."""

    most = 2

    def __init__(self) -> None:
        self.order: collections.deque[weakref.ref[Parcel]] = collections.deque()
        self.known: weakref.WeakValueDictionary[int, Parcel] = weakref.WeakValueDictionary()

    def find(self, source: torch.Tensor) -> Parcel | None:
        """What has taken this memory, which several regions are given, as it is now."""
        plain = type(source) in _PLAIN and source.layout is torch.strided
        found = self.known.get(storage_key(source)) if plain else None
        return found if found is not None and found.version == version_of(source) else None

    def add(self, parcel: Parcel) -> None:
        if type(parcel.host) is torch.Tensor and (memory := memory_of(parcel.host)) is not None:
            parcel.storage = StorageWeakRef(memory)  # this memory, not what comes to lie at its place later
            self.known[parcel.storage.cdata] = parcel
        if self.order and (before := self.order[-1]()) is not None:
            before.leave()
        self.order.append(weakref.ref(parcel))
        if len(self.order) > self.most + 1 and (first := self.order.popleft()()) is not None:
            first.wait()


_queue = _Queue()


class Elsewhere:
    """A kept value that is not on its device."""

    __slots__ = ()


class Away(Elsewhere):
    """A kept value that lies in host memory: what one parcel holds, or a view of that."""

    __slots__ = ("bits", "parcel", "view")

    def __init__(self, parcel: Parcel, view: torch.Tensor | None = None) -> None:
        self.parcel, self.bits = parcel, parcel.bits
        self.view: tuple[Any, Any, Any] | None = None
        if view is not None:
            self.view = view.size(), view.stride(), view.storage_offset() - parcel.offset
            self.bits = bits(view)

    def __bool__(self) -> bool:
        """Whether it has left its device."""
        return self.parcel.sent is not None

    @property
    def host(self) -> torch.Tensor:
        """The value where it lies."""
        return self._look(self.parcel.host)

    def get(self, alone: bool = False) -> torch.Tensor:
        """The value on its device; if `alone`, in memory that no other kept value looks into."""
        value = self._look(self.parcel.take())
        # A new tensor object each time: autograd writes its own record on it.
        return value.clone() if alone and self.view is not None else value.detach()

    def _look(self, tensor: torch.Tensor) -> torch.Tensor:
        return with_bits(tensor if self.view is None else tensor.as_strided(*self.view), self.bits)


def send(value: torch.Tensor, root: Any = None, source: torch.Tensor | None = None) -> Away:
    """Send a value to the host, unless what is kept of the op that made its memory, `root`, covers it; a view
    of a `source`, which a region was given, as soon as another such one is there."""
    if isinstance(root, Away) and root.view is None and root.parcel.covers(value):
        return Away(root.parcel, value)
    known = None if source is None else _queue.find(source)
    if known is not None:
        place = value.shape, value.stride(), value.storage_offset(), value.dtype, bits(value)
        if place == (known.host.shape, known.stride, known.offset, known.host.dtype, known.bits):
            return Away(known)
        if known.covers(value):
            return Away(known, value)
    return Away(Parcel(value, source))


def away_in(kept: Any) -> Iterable[Away]:
    """The values among what is kept of an op that lie in host memory."""
    if isinstance(kept, Away):
        yield kept
    elif isinstance(kept, (tuple, list)):
        for part in kept:
            yield from away_in(part)


def held_tensors(kept: Any) -> list[tuple[torch.Tensor, Any]]:
    """The tensors that are held for a kept value, and whether each is an offloaded one; true once it left."""
    return [*((away.host, away) for away in away_in(kept)), *((tensor, False) for tensor in tensors_in(kept))]


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

    A backward fetches one region ahead of the one that it reads. It meets regions in the reverse order of
    their forwards. When a region begins to read what it sent away, the values of the forward that ended just
    before are fetched too. They arrive while the first region computes.

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

    @uncompiled  # (The engine may forget it in the middle of compiled code.)
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
