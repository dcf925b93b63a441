"""Kept values that a graph sends to host memory and fetches for the recomputation.

A graph has one order. So the fetch of a region is put before the recomputation of the region that is
recomputed before it: as in eager, copies run beside what is computed (`offload.transfer`), one region ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from remat.transforms.compat import as_it_is, traced
from remat.transforms.compiled.barrier import as_fenced, fence_below, fence_fake, fenced, on_local
from remat.transforms.offload import Elsewhere, copied_to_host, lane, to_device
from remat.transforms.sharded import local_tensors

_library = torch.library.Library("remat", "FRAGMENT")
# A CUDA graph holds no host memory, and its replay asks nobody whether a copy has arrived. (Inductor is told
# to capture no part of such a graph.)
for _schema in (
    "send(Tensor value) -> Tensor",
    "sent(Tensor value, Tensor[] hosts) -> Tensor",
    "fetch(Tensor host, Device device, Tensor[] after) -> Tensor",
    "arrived(Tensor value, Tensor[] after) -> Tensor",
    "arrived.wait(Tensor value) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))

# By the address of what was fetched: the mark that says when it is there.
_marks: dict[int, Any] = {}


def _send(value: torch.Tensor) -> torch.Tensor:
    return copied_to_host(value)


def _fetch(host: torch.Tensor, device: torch.device, after: Sequence[torch.Tensor]) -> torch.Tensor:
    copy = to_device(host, device)
    if copy.mark is not None:
        _marks[copy.tensor.data_ptr()] = copy.mark
    return copy.tensor


def _wait(value: torch.Tensor) -> None:
    # What was fetched is computed with from now on: Inductor's code calls this.
    mark = _marks.pop(value.data_ptr(), None) if _marks else None
    if mark is not None:
        lane(value).arrived(value, mark)


def _arrived(value: torch.Tensor, after: Sequence[torch.Tensor]) -> torch.Tensor:
    _wait(value)
    return as_fenced(value, after)


def _send_fake(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value, device="meta" if value.is_meta else "cpu")


for _name, _kernel, _fake in (
    ("send", _send, _send_fake),
    ("sent", as_fenced, fence_fake),
    ("fetch", _fetch, lambda host, device, after: torch.empty_like(host, device=device)),
    ("arrived", _arrived, fence_fake),
    ("arrived.wait", _wait, lambda value: None),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"remat::{_name}", _fake, lib=_library)

# What they wait for may be batched, as with a fence.
_library.impl("fetch", lambda host, device, after: _fetch(host, device, ()), "Batched")
_library.impl("arrived", lambda value, after: _arrived(value, ()), "Batched")
FETCH = torch.ops.remat.fetch.default
_SEND, ARRIVED = torch.ops.remat.send.default, torch.ops.remat.arrived.default


def behind(value: torch.Tensor, first: Sequence[torch.Tensor]) -> torch.Tensor:
    """`value`, behind a fence that stands after `first`: what is sent, or copies of what is written to.
    Otherwise those might be made as the forward ends, or in the backward. What comes behind may be a result
    of the graph: it is no copy."""
    return fenced(value, first, torch.ops.remat.sent.default)


class Sent(Elsewhere):
    """A kept value that the graph copies to the host."""

    __slots__ = ("before", "device", "fetched", "host", "tensor")

    def __init__(self, tensor: torch.Tensor, waits: bool = False) -> None:
        """`waits`: it is sent when the next one that waits is made, so the last of a graph never is."""
        self.device, self.tensor, self.host = tensor.device, as_it_is(tensor), None
        self.fetched: torch.Tensor | None = None
        self.before: Sent | None = None
        if waits and (at := traced(tensor)) is not None:
            self.before = _waiting.get(at[0])
            _waiting[at[0]] = self
        for one in (self.before,) if waits else (self,):
            if one is not None:
                one.host = on_local(_SEND, one.tensor)

    def hosts(self) -> list[torch.Tensor]:
        """What was sent when this value was made: itself, or the one that had waited."""
        first = self.before if self.before is not None else self
        return [] if first.host is None else [first.host]

    def fetch(self, after: Sequence[torch.Tensor]) -> None:
        """Begin to copy it back, once `after` are there."""
        if self.host is not None:
            self.fetched = on_local(FETCH, self.host, self.device, list(local_tensors(after)))

    def fenced(self, after: Sequence[torch.Tensor]) -> torch.Tensor:
        """The value on its device, behind a fence."""
        if self.fetched is None:
            return fence_below(self.tensor, after)
        return fenced(self.fetched, after, ARRIVED)


# The value of a graph under way that waits.
_waiting: weakref.WeakKeyDictionary[Any, Sent] = weakref.WeakKeyDictionary()
