"""A tap on what regions keep, for `saved_residuals` and the tests: `report` costs nothing when nobody
listens."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import (
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from typing import (
    Any,
    Protocol,
)

import torch

from remat.transforms.compat import (
    is_strided,
    storage_key,
    watch_fused_steps,
)
from remat.transforms.context import active
from remat.transforms.ops import storage
from remat.transforms.pytree import flatten
from remat.transforms.sharded import local_tensors


@dataclass(frozen=True)
class Kept:
    """One tensor that a region keeps from its forward to its backward.

    Attributes:
        why: "argument", "captured", "policy", "decision", "random" (generator state) or "residual" (a value
            kept because keeping it costs no more than what it would be recomputed from).
        tensor: the tensor itself, below functorch.
        region: the region's name.
        index: the argument's position among the region's tensors, or the op's position in the region.
        op: the op that made it, None for arguments.
        name: its `checkpoint_name`, or None.
        away: whether it lies in host memory, sent there: true once it has left.
        placements: of the `DTensor` whose local part it is, where that is known.
    """

    why: str
    tensor: torch.Tensor
    region: str
    index: int
    op: Any = None
    name: str | None = None
    away: Any = False
    placements: str | None = None


def made_by(args: Any, kwargs: Any, out: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """The blocks of memory of an op's results that are not those of its operands, with their keys."""
    given = {storage_key(t) for t in flatten((args, kwargs))[0] if is_strided(t)}
    for tensor in flatten(out)[0]:
        if is_strided(tensor) and (key := storage_key(tensor)) not in given:
            yield key, tensor.untyped_storage()


def report(kept: Kept) -> None:
    """Tell every listener of this thread of a kept tensor."""
    for listener in active.listeners:
        listener.append(kept)


@contextlib.contextmanager
def listen(heard: Any = None) -> Iterator[Any]:
    """Collect what the regions called inside keep, in a new list or whatever else has `append`."""
    heard = [] if heard is None else heard
    active.listeners = (*active.listeners, heard)
    try:
        yield heard
    finally:
        # By identity: two listeners that heard nothing compare equal.
        active.listeners = tuple([other for other in active.listeners if other is not heard])


# -- holders ---------------------------------------------------------------------------------------------
# Who holds tensors from outside until a backward, for writes by fused optimizers, which no version tells.


class Holder(Protocol):
    """What holds tensors until a backward and knows their versions."""

    def memories(self) -> Iterable[int]:
        """Their storages."""
        ...


# Weak references to those that are alive; each takes its own out when it goes. (A set's own methods, as
# every call of a region adds one.)
holders: set[weakref.ref[Any]] = set()
# Not empty once fused steps are watched.
noticing: list[bool] = []


def holds(holder: Holder) -> None:
    """Note a holder, and watch fused steps from the first one on."""
    if not noticing:
        noticing.append(True)
        watch_fused_steps(_stepped)
    holders.add(weakref.ref(holder, holders.discard))


def _stepped(parameters: Sequence[torch.Tensor]) -> None:
    """Count up the versions of those parameters that are held."""
    alive = [holder for ref in list(holders) if (holder := ref()) is not None]
    held = {key for holder in alive for key in holder.memories()}
    for parameter in parameters if held else ():
        if any(storage(part) in held for part in local_tensors([parameter])):
            torch.autograd.graph.increment_version(parameter)
