"""How a frame of plain autograd holds what it was given until the backward."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from remat.transforms.compat import (
    at_backward_end,
    at_transforms,
    graph_kept,
    graph_task,
    push_hooks,
    top_hooks,
    uncompiled,
)
from remat.transforms.context import Numbered, beyond_regions, numbered, numbered_again, packed_by, untracked
from remat.transforms.errors import RematError, not_repeated, written
from remat.transforms.ops import hands_out, lying_as, metadata, version_of
from remat.transforms.tape import Held, Tape, map_tensors

if TYPE_CHECKING:
    from remat.transforms.eager.frame import Frame

# Tensors that a region under hooks of the user's has made of nothing that it was given, and that were stored:
# a later run finds them (in a cache, on a module) and makes none. Such are no business of hooks, in any run.
tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Handle:
    """What autograd holds in the place of a value: it is gone when no backward can want the value."""

    __slots__ = ("__weakref__", "at", "value")

    def __init__(self, at: int) -> None:
        self.at = at
        self.value: Held | None = None  # the value itself, where it is held as it is


class Yielding:
    """Base of what stands behind saved-tensor hooks that are off within transforms of torch.func.

    What autograd saves there is hooked when the function is through.
    """

    __slots__ = ()

    def stood_back(self) -> None:
        """A transform begins."""


class Packer(Yielding):
    """Base of what stands behind the hooks of a region."""

    __slots__ = ("inner", "inputs")

    inner: int  # how many regions inside this one are handing their arguments over right now
    inputs: Any  # what the region was called with (`inputs.Inputs`)


class SavedInput:
    """A tensor from outside a region, kept across through the hooks of whoever encloses the region."""

    __slots__ = ("_fetched", "_given", "_known", "_task", "meta", "packed", "unpack", "version", "watched")

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
        self._task = -1  # the backward pass for which it was fetched
        self.unpack, self.meta, self.version, self.watched = None, None, -1, None
        self._given: Any = None  # the tensor itself, by weak reference, and its version
        self._known: Numbered = ()
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
            self._given = weakref.ref(tensor), weakref.ref(around), version_of(around)
        else:
            self._given = weakref.ref(tensor), weakref.ref(around), version_of(around)
            self.packed, self.unpack = packed_by(hooks[0], untracked(tensor.detach)), hooks[1]
            self.meta, self._known = metadata(tensor), numbered(tensor)
            if not around.is_inference() and hands_out(self.packed, tensor):
                self.watched = untracked(around.detach)
                self.version = version_of(self.watched)

    def get(self, inputs: Any, at: int) -> torch.Tensor:
        """The tensor again, without a history, the same object each time; `inputs.path` finds its name."""
        if self.unpack is not None:
            if not self.unwritten:
                named = inputs.path(at, self._given[0]() if self._given[0]() is not None else self.watched)
                raise RematError(written(f"region {inputs.region.name!r}", self.watched, named))
            # Once a pass: torch's checkpoint gives it once.
            if self._fetched is None or self._task != graph_task():
                if self.meta is None:
                    fetched: torch.Tensor = self.unpack(self.packed).detach()
                else:
                    fetched = untracked(beyond_regions(self.unpack, self.packed).detach)
                    fetched = untracked(lying_as, fetched, self.meta)
                    numbered_again(fetched, self._known)
                self._fetched, self._task = fetched, graph_task()
            return self._fetched
        if self.version >= 0 and self.watched._version != self.version:
            raise RematError(
                written(f"region {inputs.region.name!r}", self.packed, inputs.path(at, self.packed))
            )
        return self.packed

    def given(self) -> torch.Tensor | None:
        """The tensor that hooks were given, which says more of what a region reads than what they give back;
        None if it is gone or was written to."""
        if self._given is None:
            return None
        tensor, around, version = self._given[0](), self._given[1](), self._given[2]
        same = tensor is not None and around is not None and version_of(around) == version
        return tensor if same else None

    @property
    def unwritten(self) -> bool:
        """Whether nobody has written to it since, as far as is known here."""
        return self.version < 0 or self.watched._version == self.version

    def forget(self, task: int = -1) -> None:
        """Let go of what hooks gave, but for the backward pass `task`."""
        if task == -1 or self._task != task:
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
            number = tape.saved_values[place][0]
            op = tape.say(tape.makers[number]) if number >= 0 else "a tensor from outside"
            what = f"{op} made {list(shape)} in the forward and now {list(made.shape)}"
            raise RematError(not_repeated(tape.region, what))


def belongs_to_region(hook: Any) -> bool:
    """Whether a saved-tensor hook is that of a region."""
    return isinstance(getattr(hook, "__self__", None), Packer)


def users(hooks: Hooks | None) -> Hooks | None:
    """The innermost saved-tensor hooks that are the user's own."""
    while hooks is not None and isinstance(frame := getattr(hooks[0], "__self__", None), Packer):
        hooks = frame.inputs.hooks
    return hooks


def users_own(hooks: Hooks | None) -> bool:
    """Whether these hooks are the user's own, with no region in between."""
    return hooks is not None and users(hooks) is hooks


def enclosed() -> bool:
    """Whether the saved-tensor hooks in force are those of a region."""
    hooks = top_hooks()
    return hooks is not None and belongs_to_region(hooks[0])


# -- what recomputed values become when a backward pass ends -------------------------------------------------
#
# They go. But a pipeline that splits its backward (ZeroBubble) takes gradients of inputs in a pass that keeps
# its graph, and those of weights much later. The first time a region is recomputed for both, and what the
# later passes read again is noted in its trace. From then on these values stay, but for regions in regions.

RESTING = -2  # the `task` of a frame whose values have outlived their pass


class _Passing(threading.local):
    """The frames that have made values for the backward pass at hand, by weak reference. With each the values
    that were there, None where nothing is learnt of that, and those that a later pass reads, too."""

    task = -1
    frames: Any = ()
    # The frame that has made values last, where a pass leaves many of them unread.
    last: Any = None


_passing = _Passing()


def noted(frame: Frame, task: int) -> None:
    """Note that values of `frame` are read in the backward pass `task`, -1 outside of any."""
    if task == -1:
        return
    if task != _passing.task:
        frames: list[Any] = []
        _passing.task, _passing.frames = task, frames
        at_backward_end(functools.partial(_ended, frames, task))
    # (One that is recorded is no part of a backward.)
    kept = graph_kept() and not torch.is_grad_enabled()
    there = frozenset(frame.values) if kept or frame.read is not None else None
    stay = {at: frame.values[at] for at in frame.later & there} if kept and there else {}
    _passing.frames.append((weakref.ref(frame), there, stay))


@uncompiled  # as compiled code may leave a backward to Python
def _ended(passed: list[Any], task: int) -> None:
    """The end of a pass: what it has left unread goes, but for what later ones read again."""
    for ref, there, stay in passed:
        if (frame := ref()) is None or frame.task != task:
            continue
        if there is not None:
            read = there - frame.values.keys()
            # One that reads the same, or more, is no part of a backward, such as one for a row of a Jacobian.
            if frame.read and read < frame.read:
                frame.later |= read
            frame.read = frame.read or read
        stay = {**stay, **{at: value for at, value in frame.values.items() if at in frame.later}}
        frame.forget()
        # Those of other regions may lie in memory whose version nobody sees.
        if stay and frame.inputs.hooks is None and not (frame.store or frame.rerun or frame.spent):
            frame.values = {at: value for at, value in stay.items() if frame.rests(at, value)}
            frame.task = RESTING
    passed.clear()  # the thread's next pass may be far off
    if _passing.frames is passed:
        _passing.task = -1


def resumed(frame: Frame, task: int, at: int) -> bool:
    """Whether value `at` has outlived its pass and may be read in another: nobody wrote to its memory.

    Or that pass goes on, and a node of it differentiates (implicit layers): inner passes read what it made.
    """
    if frame.task == -1 or task == -1 or at not in frame.values:
        return False
    if frame.task != RESTING:
        return frame.rests(at, frame.values[at])
    kept: list[Any] = []
    for value in frame.kept.values():
        map_tensors(kept.append, value)
    if not all([held.unwritten for held in (*frame.held.values(), *kept)]):
        return False
    frame.task = task
    noted(frame, task)
    return True


def one_at_a_time(frame: Frame) -> None:
    """Values of a frame are about to be made: let go of what the one before has left unread.

    Through a recorded backward and the forward's own graph a pass comes by twice; of tangents with a history
    it reads nothing unless it started from one.
    """
    leaves = frame.recorded is not None or frame.tape.tangents
    last = None if _passing.last is None else _passing.last()
    if last is not None and last is not frame and last not in _around(frame):
        last.forget(last.task)
    _passing.last = weakref.ref(frame) if leaves else None


def _around(frame: Frame) -> Iterator[Packer]:
    """The frames of the regions around this one, the next one first."""
    hooks = frame.inputs.hooks
    while hooks is not None and isinstance(around := getattr(hooks[0], "__self__", None), Packer):
        yield around
        hooks = around.inputs.hooks


# -- hooks, and transforms of torch.func --------------------------------------------------------------

_standing = [False]  # whether such hooks were pushed in this process


def hook(pair: Hooks) -> None:
    """Push hooks of a `Yielding`, which stand back for transforms of torch.func; `pop_hooks` ends that."""
    push_hooks(*pair)
    if not _standing[0]:
        _standing[0] = True
        at_transforms(
            lambda pair: isinstance(getattr(pair[0], "__self__", None), Yielding),
            lambda pair: pair[0].__self__.stood_back(),
        )
