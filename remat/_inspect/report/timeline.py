"""Which bytes lived when: the blocks of memory of one forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from remat._core import format_shape
from remat.transforms import flatten
from remat.transforms.compat import is_strided, storage_key
from remat.transforms.tape import Kept, made_by

CATEGORIES = ("arguments", "policy", "inputs", "autograd", "recomputed", "other")
_BY_POLICY = ("policy", "decision", "random")


@dataclass
class MemoryBlock:
    """One block of memory that an op made.

    Attributes:
        made: the op that made it, by its position among those that ran.
        freed: the first op that ran without it; None where it lived to the end.
        bytes: its size.
        when: the pass that made it.
        region: the region that it was made for, or that keeps it.
        shape: of the tensor that the op made, as `f32[4,8]`.
        why: why a region keeps it, as in `Kept.why`, or None.
        name: its `checkpoint_name`, where a region keeps it.
        seen: bytes of the largest tensor in it that a region keeps, 0 where none does.
        copied: whether it is made of one weight alone, as its transpose or cast is.
    """

    made: int
    bytes: int
    when: str
    region: str | None
    shape: str
    freed: int | None = None
    why: str | None = None
    name: str | None = None
    seen: int = 0
    copied: bool = False

    def category(self, boundary: int) -> str:
        """What it is for, one of `CATEGORIES`; `boundary` is the first op after the forward."""
        if self.when == "recompute":
            return "recomputed"
        if self.why is not None:
            return "policy" if self.why in _BY_POLICY else "inputs"
        waits = self.when == "forward" and (self.freed is None or self.freed > boundary)
        return "autograd" if waits else "other"


@dataclass(frozen=True)
class Timeline:
    """One forward and backward, op by op.

    Attributes:
        ops: what ran, as `Ran`s.
        blocks: the memory that ops made.
        boundary: the first op after the forward, by its position among `ops`.
        arguments: bytes of the arguments, weights and captured tensors that ops read; they live throughout.
    """

    ops: tuple[Any, ...]
    blocks: tuple[MemoryBlock, ...]
    boundary: int
    arguments: int

    def live(self) -> list[int]:
        """Bytes alive of what ops made, at each op."""
        change = [0] * (len(self.ops) + 1)
        for block in self.blocks:
            if block.freed != block.made:
                change[min(block.made, len(self.ops))] += block.bytes
                change[len(self.ops) if block.freed is None else block.freed] -= block.bytes
        total, found = 0, []
        for step in change[:-1]:
            total += step
            found.append(total)
        return found

    def waiting(self) -> Iterator[MemoryBlock]:
        """The blocks that live between forward and backward."""
        for block in self.blocks:
            if block.made < self.boundary and (block.freed is None or block.freed > self.boundary):
                yield block


class Blocks:
    """Follows the memory that ops make, and what they read that was there before."""

    def __init__(self) -> None:
        self.all: list[MemoryBlock] = []
        self.live = self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, MemoryBlock]] = {}
        self._outside: dict[int, tuple[StorageWeakRef, int]] = {}

    def follow(self, at: int, when: str, region: str | None, args: Any, kwargs: Any, out: Any) -> None:
        """Note what an op made, the `at`-th, and what is gone since the one before."""
        self.sweep(at)
        if when == "forward":
            # (What a backward reads besides are the derivatives that it was started with.)
            self._look_outside(args, kwargs)
        shapes = {storage_key(t): format_shape(t.dtype, t.shape) for t in flatten(out)[0] if is_strided(t)}
        for key, storage in made_by(args, kwargs, out):
            if key not in self._alive:
                copied = self._is_copy(args, kwargs, out)
                block = MemoryBlock(at, storage.nbytes(), when, region, shapes[key], copied=copied)
                self._alive[key] = StorageWeakRef(storage), block
                self.all.append(block)
                self.live += block.bytes
        self.peak = max(self.peak, self.live)

    def sweep(self, at: int) -> None:
        """Note what is gone."""
        for key in [key for key, (ref, _) in self._alive.items() if ref.expired()]:
            block = self._alive.pop(key)[1]
            block.freed = at
            self.live -= block.bytes

    def mark(self, key: int, kept: Kept, size: int) -> None:
        """A region keeps a tensor of `size` bytes in this block, and says why."""
        if key in self._alive:
            block = self._alive[key][1]
            block.seen = max(block.seen, size)
            if block.why not in _BY_POLICY:
                block.why, block.region, block.name = kept.why, kept.region, kept.name

    def outside(self) -> int:
        """Bytes that ops read and that no op made."""
        return sum(size for _, size in self._outside.values())

    def _is_copy(self, args: Any, kwargs: Any, out: Any) -> bool:
        read = [t for t in flatten((args, kwargs))[0] if is_strided(t)]
        if len(read) != 1 or not is_strided(out) or out.numel() != read[0].numel():
            return False
        return read[0].requires_grad and storage_key(read[0]) in self._outside

    def _look_outside(self, args: Any, kwargs: Any) -> None:
        for tensor in flatten((args, kwargs))[0]:
            if not is_strided(tensor) or (key := storage_key(tensor)) in self._alive:
                continue
            known = self._outside.get(key)
            if known is None or known[0].expired():
                storage = tensor.untyped_storage()
                self._outside[key] = StorageWeakRef(storage), storage.nbytes()
