"""Methods of tensors that a build without CUDA refuses on fake tensors of a GPU, by the ops that they are.

Written by hand in torch, they ask for a device guard first, which such a build has for CPUs alone. What torch
and this library run on fake tensors while code is made calls them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

aten = torch.ops.aten


@contextlib.contextmanager
def methods_by_ops() -> Iterator[None]:
    """Within, these methods run on fake tensors of a GPU; elsewhere they are as they were."""
    with contextlib.ExitStack() as stack:
        for name, own in _OWN.items():
            stack.enter_context(
                mock.patch.object(torch.Tensor, name, _chosen(getattr(torch.Tensor, name), own))
            )
        yield


def _chosen(theirs: Any, own: Any) -> Any:
    return lambda self, *args, **kwargs: (own if self.is_cuda else theirs)(self, *args, **kwargs)


def _copy(self: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
    return aten.copy_.default(self, source, non_blocking)


def _item(self: torch.Tensor, index: Any) -> torch.Tensor:
    """The part that an index names, as Python writes it."""
    parts = index if isinstance(index, tuple) else (index,)
    named = sum(part is not None and part is not ... for part in parts)
    found, dim, tensors = self, 0, []
    for part in parts:
        if part is ...:
            dim += self.dim() - named
        elif part is None:
            found, dim = aten.unsqueeze.default(found, dim), dim + 1
        elif isinstance(part, slice):
            found = aten.slice.Tensor(found, dim, part.start, part.stop, part.step or 1)
            dim += 1
        elif isinstance(part, torch.Tensor):
            tensors += [None] * (dim - len(tensors)) + [part]
            dim += 1
        else:
            found = aten.select.int(found, dim, part)
    return aten.index.Tensor(found, tensors) if tensors else found


def _set_item(self: torch.Tensor, index: Any, value: Any) -> None:
    place = _item(self, index)
    if isinstance(value, torch.Tensor):
        aten.copy_.default(place, value)
    else:
        aten.fill_.Scalar(place, value)


_OWN = {
    "copy_": _copy,
    "contiguous": lambda self, memory_format=torch.contiguous_format: aten.contiguous.default(
        self, memory_format=memory_format
    ),
    "__invert__": aten.bitwise_not.default,
    "__getitem__": _item,
    "__setitem__": _set_item,
}
