"""Memory from outside as it was before a region wrote to it, for the recomputation to write to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from remat.transforms.compat import memory_is_real, version_kept
from remat.transforms.context import quiet
from remat.transforms.tape.values import memory_of


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

    def differs(self, tensor: torch.Tensor) -> bool:
        """Whether something else lies in the memory of `tensor` now."""
        memory = memory_of(tensor)
        if self.memory is None or memory is None or memory.nbytes() != self.memory.nbytes():
            return False
        return not torch.equal(octets(memory), octets(self.memory))

    def put_back(self, tensor: torch.Tensor) -> None:
        """Let the memory of `tensor` hold what it held."""
        memory = memory_of(tensor)
        if memory is None or self.memory is None:
            tensor.detach().copy_(self.view(tensor))
        else:
            memory.copy_(self.memory)

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
        return [octets(self.memory)]


@contextlib.contextmanager
def lent(pairs: Iterable[tuple[torch.Tensor, Snapshot]]) -> Iterator[None]:
    """Within, tensors hold what they held before a region wrote to them, for a run that writes to them again.

    Where no mode gives the run scratch copies instead: writes are raw ones, or ops cannot be compared.
    Afterwards they hold what they hold now, and their versions tell nobody.
    """
    with contextlib.ExitStack() as stack:
        for tensor, before in pairs:
            stack.enter_context(version_kept(tensor))
            stack.callback(quiet, quiet(Snapshot, tensor).put_back, tensor)
            quiet(before.put_back, tensor)
        yield


def octets(memory: torch.UntypedStorage) -> torch.Tensor:
    """A memory as a tensor."""
    empty = torch.empty(0, dtype=torch.uint8, device=memory.device)
    return empty.set_(memory, 0, (memory.nbytes(),), (1,))
