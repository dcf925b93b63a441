"""Who holds tensors from outside until a backward, for writes by fused optimizers, which no version tells."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from remat.transforms.compat import watch_fused_steps
from remat.transforms.ops import storage
from remat.transforms.sharded import local_tensors


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
