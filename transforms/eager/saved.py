"""How a frame of plain autograd holds what it was given until the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from remat.transforms.errors import RematError
from remat.transforms.placeholders import hollow, metadata
from remat.transforms.tape import written

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Owner(Protocol):
    """Who holds: names the region and the tensor in messages."""

    def path(self, at: int | None, tensor: torch.Tensor) -> str | None: ...

    @property
    def label(self) -> str: ...


class Packer:
    """Base of what stands behind saved-tensor hooks."""

    __slots__ = ("inner", "inputs")

    inner: int  # how many regions inside this one are handing their arguments over right now
    inputs: Any  # what the region was called with (`eager.inputs.Inputs`)


class Held:
    """A tensor kept across, through the hooks of whoever encloses the region."""

    __slots__ = ("leaf", "packed", "requires_grad", "unpack", "version")

    def __init__(self, tensor: torch.Tensor, hooks: Hooks | None) -> None:
        alias = tensor.detach()
        self.version = 0 if alias.is_inference() else alias._version
        self.requires_grad, self.leaf = tensor.requires_grad, tensor.is_leaf
        self.unpack = None
        self.packed: Any = alias
        if hooks is not None:
            self.packed, self.unpack = _pack(hooks[0], alias), hooks[1]

    def get(self, owner: Owner, at: int | None = None) -> torch.Tensor:
        """The tensor again; `at` is its place among the leaves of the arguments."""
        if self.unpack is not None:
            return self.unpack(self.packed).detach()
        if not self.packed.is_inference() and self.packed._version != self.version:
            raise RematError(written(owner.label, self.packed, owner.path(at, self.packed)))
        return self.packed.detach()

    @property
    def enclosed(self) -> bool:
        """Whether an enclosing region is to recompute it."""
        return belongs_to_region(self.unpack)


class Absent:
    """Stands for an argument that nothing in the backward reads."""

    __slots__ = ("leaf", "meta", "requires_grad", "spare", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.meta = metadata(tensor)
        self.requires_grad, self.leaf = tensor.requires_grad, tensor.is_leaf
        # The graph itself holds on to leaves, to add up their gradients: then so may we.
        self.spare = tensor.detach() if self.leaf and self.requires_grad else None
        self.version = tensor._version if self.spare is not None else 0

    def get(self, owner: Owner, at: int | None = None) -> torch.Tensor:
        return hollow(self.meta) if self.spare is None else self.spare.detach()

    @property
    def readable(self) -> bool:
        """Whether it is there after all, as it was."""
        return self.spare is not None and self.spare._version == self.version


def belongs_to_region(hook: Any) -> bool:
    """Whether a saved-tensor hook is that of a region."""
    return isinstance(getattr(hook, "__self__", None), Packer)


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


def _pack(pack: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    # An enclosing region that is being recomputed must not stop here, in the middle of ours: k nested regions
    # run the inner function 1 + k times, as in JAX.
    frame = getattr(pack, "__self__", None)
    if not isinstance(frame, Packer):
        return pack(tensor)
    frame.inner += 1
    try:
        return pack(tensor)
    finally:
        frame.inner -= 1
