"""What a recomputation starts from: kept values, and memory from outside as it was before a write."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from remat.transforms.compat import memory_is_real
from remat.transforms.errors import RematError
from remat.transforms.offload import Elsewhere
from remat.transforms.tape.tape import written
from remat.transforms.tape.values import map_tensors, memory_of, version_of


class Held(Elsewhere):
    """A value of a region, held until the backward.

    Args:
        tensor: the value.
        watched: a tensor in the same memory that the caller has, and may write to.
        region: the name of the region.
        hooks: the user's saved-tensor hooks, which it goes through as autograd's own saved values do.
    """

    __slots__ = ("hooks", "packed", "region", "version", "watched")

    def __init__(self, tensor: torch.Tensor, region: str, hooks: Any, watched: Any = None) -> None:
        plain = tensor.detach()
        self.region, self.hooks = region, hooks
        # What is made below autograd, as by a recorder, has a version of its own.
        self.watched = plain if watched is None else watched.detach()
        self.version = version_of(self.watched)
        self.packed: Any = plain if hooks is None else hooks[0](plain)

    def get(self, alone: bool = False) -> torch.Tensor:
        """The value again; if `alone`, in memory of its own."""
        if self.hooks is not None:
            value = self.hooks[1](self.packed)
        elif version_of(self.watched) != self.version:
            raise RematError(written(self.region, self.packed))
        else:
            value = self.packed
        # A new tensor object each time: autograd writes its own record on it.
        return value.clone() if alone else value.detach()


def held_values(
    kept: dict[int, Any], region: str, watched: Callable[[int], Any], hooks: Any = None
) -> dict[int, Any]:
    """What is kept of ops, to be held until the backward; `watched(at)`: see `Held`."""

    def hold(at: int, value: Any) -> Any:
        return value if isinstance(value, Elsewhere) else Held(value, region, hooks, watched(at))

    return {at: map_tensors(functools.partial(hold, at), value) for at, value in kept.items()}


class Snapshot:
    """A copy of the memory of a tensor: all of it, so that every view of it can be had again."""

    __slots__ = ("memory", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        memory = memory_of(tensor) if type(tensor) in (torch.Tensor, torch.nn.Parameter) else None
        if memory is None or tensor.is_meta or not memory_is_real():
            self.memory, self.tensor = None, tensor.detach().clone()
        else:
            self.memory, self.tensor = memory.clone(), None

    def copy(self) -> Snapshot:
        """Another one, to be written to."""
        made = Snapshot.__new__(Snapshot)
        made.memory = None if self.memory is None else self.memory.clone()
        made.tensor = None if self.tensor is None else self.tensor.clone()
        return made

    def view(self, like: torch.Tensor) -> torch.Tensor:
        """What `like`, a tensor in the memory that was copied, was."""
        if self.memory is None:
            assert self.tensor is not None
            return self.tensor
        empty = torch.empty(0, dtype=like.dtype, device=like.device)
        return empty.set_(self.memory, like.storage_offset(), like.shape, like.stride())

    def tensors(self) -> list[torch.Tensor]:
        """What is held, for reports."""
        if self.memory is None:
            return [] if self.tensor is None else [self.tensor]
        device = self.memory.device
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        return [empty.set_(self.memory, 0, (self.memory.nbytes(),), (1,))]
