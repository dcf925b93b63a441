"""A backward that is recorded (`create_graph=True`): what its graph holds of values that were made again.

Each node of that backward saves what its formula reads, recomputed values among it, and the second derivative
reads them long after. Hooks that are pushed while a node asks for a value hold for the rest of that node
alone: torch gives each node the hooks of the pass anew. So these hand the region's own handle to the recorded
graph in the place of a recomputed value, and the second backward has the region make it again. Other values
stay.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from remat.transforms.compat import (
    bits,
    graph_task,
    hooks_disabled,
    in_transform,
    push_hooks,
    storage_held,
    top_hooks,
    uncompiled,
)
from remat.transforms.context import active, untracked
from remat.transforms.eager.saved import Yielding, belongs_to_region
from remat.transforms.ops import has_strides, lying_as, metadata, storage
from remat.transforms.sharded import PLAIN
from remat.transforms.tape import Held

if TYPE_CHECKING:
    from remat.transforms.eager.frame import Frame


class AskedAgain:
    """Stands in a recorded backward for a value that a frame makes again, or for another layout of it."""

    __slots__ = ("frame", "handle", "layout", "meta")

    def __init__(self, frame: Frame, handle: Any, meta: Any, layout: Any) -> None:
        self.frame, self.handle, self.meta, self.layout = frame, handle, meta, layout

    def get(self) -> torch.Tensor:
        value: torch.Tensor = self.frame.unpack(self.handle)
        if self.layout is None:
            return value
        value = untracked(lying_as, value, self.meta)  # hooks may have given back what is kept
        return untracked(value.as_strided, *self.layout, value.storage_offset())


class RecordedNode(Yielding):
    """The saved-tensor hooks of one node of a recorded backward, above those that are in force there.

    Autograd holds on to them with what they pack: so they hold no memory of what the node has asked for.
    """

    __slots__ = ("around", "read", "region")

    def __init__(self, region: str, around: Any) -> None:
        self.region, self.around = region, around
        # What it has asked for, by memory, whose number is not given again while a reference is there.
        self.read: dict[int, tuple[Any, ...]] = {}

    def asks(self, frame: Frame, handle: Any, value: torch.Tensor) -> None:
        """The node has asked `frame` for a value, which is made again for whoever asks for it later."""
        if _in_one_block(value):
            found = storage_held(value), weakref.ref(frame), handle, _numbers(value), metadata(value)
            self.read[storage(value)] = (*found, _dense(value))

    @uncompiled
    def pack(self, tensor: torch.Tensor) -> Any:
        found = self.read.get(storage(tensor)) if _in_one_block(tensor) else None
        if found is not None:
            _, ref, handle, numbers, meta, dense = found
            same = (tensor.shape, tensor.stride()) == meta[:2]
            alike = _numbers(tensor) == numbers and (same or (dense and _dense(tensor)))
            if alike and (frame := ref()) is not None:
                frame.recorded = frame.task if frame.recorded is None else frame.recorded
                return AskedAgain(frame, handle, meta, None if same else (tensor.shape, tensor.stride()))
        return Held(tensor, self.region, self.around)


def _in_one_block(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN and has_strides(tensor)


def _numbers(tensor: torch.Tensor) -> Any:
    """What two looks at one memory have in common if they have the same numbers, in any order."""
    return tensor.dtype, bits(tensor), tensor.storage_offset(), tensor.numel(), tensor._version


def _dense(tensor: torch.Tensor) -> bool:
    """Whether it fills its piece of memory, each place once."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


@uncompiled
def unpacked(packed: Any) -> torch.Tensor:
    """What `RecordedNode.pack` stands for."""
    return packed.get()


def hold_again(frame: Frame, handle: Any, value: torch.Tensor) -> None:
    """A node of a recorded backward has asked `frame` for a value: what it saves of that is the handle."""
    if graph_task() == -1 or active.stack or in_transform() or hooks_disabled() is not None:
        return
    around = top_hooks()
    node = getattr(around[0], "__self__", None) if around is not None else None
    if type(node) is not RecordedNode:
        if around is not None and belongs_to_region(around[0]):
            return  # the forward of a region is under way, which is told what is saved
        node = RecordedNode(frame.region.name, around)
        push_hooks(node.pack, unpacked)
    node.asks(frame, handle, value)
