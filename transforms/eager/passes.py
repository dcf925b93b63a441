"""What recomputed values become when a backward pass ends.

Most are read in their pass. What a pass leaves unread goes when it ends, but for the last region that it recomputed:
a pipeline that splits its backward (ZeroBubble) computes gradients of weights in one pass for each, and would
recompute a region in all of them. So the values of one region, and of those around it, outlive a pass. They go
when another region is recomputed, or when one runs forward. No pass holds more than it would without.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

from remat.transforms.compat import at_backward_end, graph_task
from remat.transforms.eager.saved import Packer
from remat.transforms.ops import version_of

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
    """Let go of what has outlived its pass: values of `frame` are to be made, or a region runs forward (None).

    Those of the regions around `frame` stay.
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
    """Whether values that have outlived their pass may be read in another one: nobody wrote to their memory."""
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
