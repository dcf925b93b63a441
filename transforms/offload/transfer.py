"""Kept values in host memory: sent while the forward goes on, fetched one region ahead in the backward.

Copies run on a stream beside the one that computes (`Lane`). The backward meets regions in the reverse order
of their forwards, so when one begins to read what it sent away, what the forward that ended just before sent
away is fetched too, and arrives while the first computes. On a device without streams, the CPU among them,
copies are made there and then and in the same order: what is decided here knows nothing of streams.

PyTorch's own `torch.autograd.graph.save_on_cpu` copies on the computing stream; torchtune's
`OffloadActivations` has a side stream and sends one tensor after another, without knowing of regions.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from remat.transforms.compat import at_backward_end, graph_task, memory_is_real
from remat.transforms.ops import instances


class Lane:
    """Copies between a device without streams of its own and the host.

    `send` and `fetch` return the copy with a mark that says when it is there; whoever reads the copy, or
    writes to what it was made of, calls `arrived` or `wait` first.
    """

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy in host memory."""
        # Tensors on the meta device have nothing to send, and are no smaller elsewhere.
        device = tensor.device if tensor.is_meta else "cpu"
        return torch.empty_like(tensor, device=device).copy_(tensor), None

    def fetch(self, host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Any]:
        """A copy on the device of a tensor that was sent."""
        return torch.empty_like(host, device=device).copy_(host), None

    def wait(self, mark: Any) -> None:
        """Let what is computed from now on come after the copy that has this mark."""

    def arrived(self, tensor: torch.Tensor, mark: Any) -> torch.Tensor:
        """A tensor that was fetched, to be computed with from now on."""
        return tensor


class StreamLane(Lane):
    """Copies on a stream of their own, to and from pinned memory, beside what the device computes.

    A copy in either direction begins when what the computing stream was given so far is done: what is sent
    has been made by then, and what is fetched goes into memory that is no longer in use. So what is fetched
    is an ordinary tensor of the computing stream's memory, and is fetched no sooner than planned however far
    the host runs ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device)

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host, self._copy(host, tensor, tensor)

    def fetch(self, host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Any]:
        tensor = torch.empty_like(host, device=device)
        return tensor, self._copy(tensor, host, tensor)

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


class _Travel(threading.local):
    where: str | None = None


_travel = _Travel()


def travelling() -> str | None:
    """Where what runs now brings a value, "host" or "device"; None for what is no part of a transfer."""
    return _travel.where


@contextlib.contextmanager
def _to(where: str) -> Iterator[None]:
    before = _travel.where
    _travel.where = where
    try:
        yield
    finally:
        _travel.where = before


_at_once = Lane()
_lanes: dict[torch.device, Lane] = {}


def lane(tensor: torch.Tensor) -> Lane:
    """How this tensor travels."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or tensor.device.type != kind.type or not memory_is_real():
        return _at_once
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        # A subclass need not know of streams.
        return _at_once
    if tensor.device not in _lanes:
        _lanes[tensor.device] = StreamLane(tensor.device)
    return _lanes[tensor.device]


class Parcel:
    """One tensor that was sent to the host, and while the backward needs it its copy on the device."""

    __slots__ = ("__weakref__", "_lane", "device", "fetched", "host", "offset", "sent", "stride", "takers")

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self._lane = lane(tensor)
        self.device = tensor.device
        with _to("host"):
            self.host, self.sent = self._lane.send(tensor)
        # Where it lay, for views of it.
        self.offset, self.stride = tensor.storage_offset(), tensor.stride()
        self.fetched: tuple[torch.Tensor, Any] | None = None
        self.takers = 0  # how many values will still be asked for of what was fetched

    def covers(self, view: torch.Tensor) -> bool:
        """Whether `view`, which looks into the same memory, is a part of it, laid out in the same way."""
        plain = type(view) is torch.Tensor and view.layout is torch.strided
        if not plain or view.dtype is not self.host.dtype or self.host.stride() != self.stride:
            return False
        start, size = view.storage_offset() - self.offset, self.host.untyped_storage().nbytes()
        return start >= 0 and (start + _span(view)) * view.element_size() <= size

    def wait(self) -> None:
        """Let what is computed from now on write to the tensor that was sent."""
        self._lane.wait(self.sent)

    def fetch(self, takers: int) -> None:
        """Begin to bring it back for so many values."""
        self.takers = takers
        if self.fetched is None:
            self.fetched = self._fetch()

    def take(self) -> torch.Tensor:
        """The tensor on its device, fetched now if it was not before."""
        fetched = self.fetched or self._fetch()
        self.takers -= 1
        if self.takers <= 0:
            self.fetched = None
        return self._lane.arrived(*fetched)

    def _fetch(self) -> tuple[torch.Tensor, Any]:
        with _to("device"):
            return self._lane.fetch(self.host, self.device)

    def drop(self) -> None:
        """Let go of the copy on the device."""
        self.fetched = None


class Elsewhere:
    """A kept value that is not on its device."""

    __slots__ = ()


class Away(Elsewhere):
    """A kept value that lies in host memory: what one parcel holds, or a view of that."""

    __slots__ = ("parcel", "view")

    def __init__(self, parcel: Parcel, view: torch.Tensor | None = None) -> None:
        self.parcel = parcel
        self.view: tuple[Any, Any, Any] | None = None
        if view is not None:
            self.view = view.size(), view.stride(), view.storage_offset() - parcel.offset

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
        return tensor if self.view is None else tensor.as_strided(*self.view)


def send(value: torch.Tensor, root: Any = None) -> Away:
    """Send a value to the host, unless what is kept of the op that made its memory, `root`, covers it."""
    if isinstance(root, Away) and root.view is None and root.parcel.covers(value):
        return Away(root.parcel, value)
    return Away(Parcel(value))


def away_in(kept: Any) -> Iterable[Away]:
    """The values among what is kept of an op that lie in host memory."""
    return instances(Away, kept)


def _span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


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
        nodes: the ops of which something was sent away, by their numbers; `kept` is what is kept of one.
    """

    def __init__(self, nodes: dict[int, Any]) -> None:
        self.nodes = nodes
        self.task = -1  # the backward pass that it was last read in
        self.open = False  # whether it is being read
        self.place = Place(self, _living(_order.last))
        _order.last = self.place

    def holds(self) -> bool:
        """Whether anything is still on the host."""
        return any(True for _ in self._aways(None))

    def fetch(self, needed: set[int] | None = None) -> None:
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

    def begin(self, needed: set[int] | None) -> None:
        """A recomputation begins that asks for what is kept of the ops in `needed`."""
        self.task, self.open = graph_task(), True
        try:
            self.fetch(needed)
            _go_ahead(self)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """The recomputation is over."""
        self.open = False
        self.drop()

    def _aways(self, needed: set[int] | None) -> Iterator[Away]:
        for at, node in self.nodes.items():
            if needed is None or at in needed:
                yield from away_in(node.kept)


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

    def turn_to(self, store: Store) -> None:
        """Begin with `store`: anything else that was fetched ahead was so in vain."""
        ahead = None if self.ahead is None else self.ahead()
        self.ahead = None
        if ahead is not None and ahead is not store and not ahead.open:
            ahead.drop()

    def end(self) -> None:
        ahead = None if self.ahead is None else self.ahead()
        self.ahead = None
        if ahead is not None:
            ahead.drop()


_passes: dict[int, _Pass] = {}


class _End:
    """Ends a pass when the engine says so, or when the engine, after an exception, forgets it."""

    __slots__ = ("task",)

    def __init__(self, task: int) -> None:
        self.task = task

    def __call__(self) -> None:
        if (ended := _passes.pop(self.task, None)) is not None:
            ended.end()

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
