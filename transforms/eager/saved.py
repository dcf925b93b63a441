"""How a frame of plain autograd holds what it was given until the backward."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from remat.transforms.compat import at_backward_end, graph_task, hooks_aside, pop_hooks, push_hooks, top_hooks
from remat.transforms.errors import RematError, not_repeated, written
from remat.transforms.ops import memory_of, version_of
from remat.transforms.tape import Held, Tape

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Handle:
    """What autograd holds in the place of a value: it is gone when no backward can want the value."""

    __slots__ = ("__weakref__", "at", "value")

    def __init__(self, at: int) -> None:
        self.at = at
        self.value: Held | None = None  # the value itself, where it is held as it is


class Packer:
    """Base of what stands behind saved-tensor hooks."""

    __slots__ = ("inner", "inputs")

    inner: int  # how many regions inside this one are handing their arguments over right now
    inputs: Any  # what the region was called with (`inputs.Inputs`)


class SavedInput:
    """A tensor from outside a region, kept across through the hooks of whoever encloses the region."""

    __slots__ = ("_fetched", "packed", "unpack", "version", "watched")

    def __init__(
        self,
        tensor: torch.Tensor,
        hooks: Hooks | None,
        written: bool = False,
        around: torch.Tensor | None = None,
    ) -> None:
        """`written`: the region itself writes to it, so that a snapshot stands for what is in it. `around`:
        the wrapper whose local tensor it is, and whose version tells of writes."""
        around = tensor if around is None else around
        self._fetched: torch.Tensor | None = None
        self.unpack, self.version, self.watched = None, -1, None
        if written:
            self.packed: Any = tensor.detach()
            return
        # The graph itself holds on to leaves, to add up their gradients.
        if hooks is None or (around.is_leaf and around.requires_grad):
            self.packed = tensor.detach()
            self.watched: Any = self.packed if around is tensor else around.detach()
            try:
                self.version = self.watched._version
            except RuntimeError:
                self.version = -1  # an inference tensor counts no writes; to ask first takes as long again
        elif isinstance(frame := getattr(hooks[0], "__self__", None), Packer):
            # An enclosing region that runs again must not stop here, in the middle of ours.
            frame.inner += 1
            try:
                self.packed, self.unpack = hooks[0](tensor), hooks[1]
            finally:
                frame.inner -= 1
        else:
            self.packed, self.unpack = hooks[0](tensor.detach()), hooks[1]

    def get(self, inputs: Any, at: int) -> torch.Tensor:
        """The tensor again, without a history, the same object each time; `inputs.path` finds its name."""
        if self.unpack is not None:
            if self._fetched is None:
                self._fetched = self.unpack(self.packed).detach()
            return self._fetched
        if self.version >= 0 and self.watched._version != self.version:
            raise RematError(written(inputs.region.name, self.packed, inputs.path(at, self.packed)))
        return self.packed

    @property
    def unwritten(self) -> bool:
        """Whether nobody has written to it since, as far as is known here."""
        return self.version < 0 or self.watched._version == self.version

    def forget(self) -> None:
        """Let go of what an enclosing region has made again."""
        self._fetched = None

    @property
    def enclosed(self) -> bool:
        """Whether an enclosing region is to recompute it."""
        return belongs_to_region(self.unpack)


def check_shapes(tape: Tape, shapes: dict[int, torch.Size], values: dict[int, torch.Tensor]) -> None:
    """Raise where saved values that were made again have other shapes than those that were saved."""
    for place, shape in shapes.items():
        made = values.get(place)
        if made is not None and made.shape != shape:
            number = tape.packed[place][0]
            op = tape.say(tape.makers[number]) if number >= 0 else "a tensor from outside"
            what = f"{op} made {list(shape)} in the forward and now {list(made.shape)}"
            raise RematError(not_repeated(tape.region, what))


class DroppedInput:
    """Stands for a tensor from outside that the backward does not read; it may be there after all."""

    __slots__ = ("around", "ref", "spare", "version")

    def __init__(self, tensor: torch.Tensor, argument: bool, around: torch.Tensor) -> None:
        """`around`: the wrapper whose local tensor it is, or itself."""
        leaf = around.is_leaf and around.requires_grad
        self.around = None if around is tensor else weakref.ref(around)
        self.spare = tensor.detach() if leaf else None
        # Of an argument nobody knows who else holds it, and for how long.
        self.ref = None if leaf or argument else weakref.ref(tensor)
        self.version = version_of(around)

    def tensor(self) -> torch.Tensor | None:
        """The tensor, if it is there and as it was."""
        tensor = self.spare if self.ref is None else self.ref()
        around = tensor if self.around is None else self.around()
        same = tensor is not None and around is not None and version_of(around) == self.version
        return tensor if same else None


def belongs_to_region(hook: Any) -> bool:
    """Whether a saved-tensor hook is that of a region."""
    return isinstance(getattr(hook, "__self__", None), Packer)


def users(hooks: Hooks | None) -> Hooks | None:
    """The innermost saved-tensor hooks that are the user's own."""
    while hooks is not None and isinstance(frame := getattr(hooks[0], "__self__", None), Packer):
        hooks = frame.inputs.hooks
    return None if hooks is None or hooks[1] is unread else hooks


def enclosed() -> bool:
    """Whether the saved-tensor hooks in force are those of a region."""
    hooks = top_hooks()
    return hooks is not None and belongs_to_region(hooks[0])


def unread(_: Any) -> torch.Tensor:
    """The second of two hooks that only watch what is saved."""
    raise RematError(
        "a value of a forward that only watches what is saved was asked for; please report this as a bug in "
        "remat"
    )


def watcher(hooks: Hooks | None) -> Callable[[torch.Tensor], Any] | None:
    """Whom to tell what a region reads without being given it, None if nobody needs to know.

    A region that runs below functorch levels calls its function again with its operands, or with empty ones
    in the place of those nobody reads. It watches what is saved, and sees nothing of what regions inside do.
    """
    while hooks is not None:
        if hooks[1] is unread:
            return hooks[0]
        frame = getattr(hooks[0], "__self__", None)
        hooks = frame.inputs.hooks if isinstance(frame, Packer) else None
    return None


class Residuals:
    """The values that autograd saves, held while they are smaller than what they would be recomputed from.

    Args:
        inputs: the region's arguments.
        recorder: what counts the bytes that a policy keeps; None holds the values in any case.
    """

    __slots__ = ("_limit", "_recorder", "_sizes", "bytes", "tensors")

    def __init__(self, inputs: Sequence[torch.Tensor], recorder: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self._sizes: set[int] = set()
        self._recorder, self._limit, self.bytes = recorder, bytes_of(inputs), 0

    def add(self, tensor: torch.Tensor) -> bool:
        """Hold one more value; whether they are still small enough."""
        self.tensors.append(tensor)
        if self._recorder is None:
            return True
        key, size = _block(tensor)
        if key not in self._sizes:
            self._sizes.add(key)
            self.bytes += size
        return self.bytes <= self._limit + self._recorder.kept_bytes

    def finish(self) -> None:
        """Somebody else holds the values now."""
        self.tensors, self._recorder = [], None


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum(dict(map(_block, tensors)).values())


def _block(tensor: torch.Tensor) -> tuple[int, int]:
    memory = memory_of(tensor)
    if memory is None:
        return id(tensor), tensor.numel() * tensor.element_size()
    return id(memory), memory.nbytes()


# -- what recomputed values become when a backward pass ends ----------------------------------------------
#
# Most are read in their pass. What a pass leaves unread goes when it ends, but for the last region that it
# recomputed: a pipeline that splits its backward (ZeroBubble) computes gradients of weights in one pass for
# each, and would recompute a region in all of them. So the values of one region, and of those around it,
# outlive a pass. They go when another region is recomputed, or when one runs forward. No pass holds more.

# A `frame` here is a `frame.Frame`, whose file imports this one.

RESTING = -2  # the `task` of a frame whose values have outlived their pass

# The frames whose values have, by weak reference: what a region keeps goes when its nodes are through. All
# threads have one list, since a pass ends in another thread than it ran in.
_resting: list[weakref.ref[Any]] = []


class _Passing(threading.local):
    """The frames that the backward pass at hand has made values for, in the order of that."""

    task = -1
    frames: Any = ()


_passing = _Passing()


def noted(frame: Any, task: int) -> None:
    """Note that values of `frame` are read in the backward pass `task`, -1 outside of any."""
    if task == -1:
        return
    if task != _passing.task:
        frames: list[weakref.ref[Any]] = []
        _passing.task, _passing.frames = task, frames
        at_backward_end(lambda: _ended(frames))
    _passing.frames.append(weakref.ref(frame))


def let_go(frame: Any = None) -> None:
    """Let go of what has outlived its pass, but for values of regions around `frame`.

    Values of that are about to be made. None: a region runs forward.
    """
    if not _resting or (frame is None and graph_task() != -1):
        return
    around = [] if frame is None else list(_around(frame))
    for ref in _resting:
        found = ref()
        if found is not None and found.task == RESTING and found not in around:
            found.forget()
    _resting[:] = [ref for ref in _resting if ref() in around]


def resumed(frame: Any, task: int) -> bool:
    """Whether values that have outlived their pass may be read in another: nobody wrote to their memory."""
    if frame.task != RESTING or task == -1:
        return False
    if not all(held.unwritten for each in (frame, *_around(frame)) for held in each.held.values()):
        return False
    frame.task = task
    let_go(frame)
    noted(frame, task)
    return True


def _around(frame: Any) -> Iterator[Any]:
    """The frames of the regions around this one, the next one first."""
    hooks = frame.inputs.hooks
    while hooks is not None and isinstance(frame := getattr(hooks[0], "__self__", None), Packer):
        yield frame
        hooks = frame.inputs.hooks


def _ended(frames: list[weakref.ref[Any]]) -> None:
    """The end of a pass: what it has left unread goes, but for its last region."""
    alive = [frame for ref in frames if (frame := ref()) is not None]
    last = [alive[-1], *_around(alive[-1])] if alive else []
    for frame in alive:
        _rest(frame) if frame in last else frame.forget()


def _rest(frame: Any) -> None:
    """Leave the values of a frame to later passes, but for those in memory whose version nobody will see."""
    for held in frame.held.values():
        held.forget()
    tape, outside = frame.tape, frame.tape.outside
    apart = {tape.nodes[at].root for at in frame.taken}
    apart |= {outside[at].root for at, held in frame.held.items() if held.unpack is not None}
    opaque = frame.rerun is not None and (tape.loose or frame.raw)

    def stays(at: int, value: Any) -> bool:
        root = tape.root_of(tape.packed[at][0])
        # A backward of the user's may have written to what it had saved.
        return not opaque and root not in apart and (root < 0 or version_of(value) == 0)

    frame.values = {at: value for at, value in frame.values.items() if stays(at, value)}
    if frame.values:
        frame.task = RESTING
        _resting.append(weakref.ref(frame))


# -- hooks, and transforms of torch.func --------------------------------------------------------------

# torch.func asks for this where a transform begins, to refuse saved-tensor hooks. It is replaced while a
# region's forward runs, whose hooks would be refused there.
_refusing_hooks = torch.autograd.graph.disable_saved_tensors_hooks


@contextlib.contextmanager
def _hooks_aside(message: str) -> Iterator[None]:
    """A transform of torch.func begins, which refuses saved-tensor hooks: those of regions are off meanwhile.

    Autograd holds what it saves there. Later calls of these regions take the primitive, which knows levels.
    """
    with hooks_aside(lambda pair: belongs_to_region(pair[0])) as taken:
        for hook, _ in taken:
            hook.__self__.inputs.region.cache.uses_func = True
        with _refusing_hooks(message):
            yield


def hook(pair: Hooks) -> None:
    """Push the hooks of a region, which stand back for transforms of torch.func."""
    torch.autograd.graph.disable_saved_tensors_hooks = _hooks_aside  # type: ignore[assignment]
    push_hooks(*pair)


def unhook(around: Hooks | None) -> None:
    """Pop them; `around`: the hooks around the region."""
    pop_hooks()
    if around is None or not belongs_to_region(around[0]):
        torch.autograd.graph.disable_saved_tensors_hooks = _refusing_hooks
