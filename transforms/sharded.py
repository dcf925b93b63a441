"""Tensors that wrap others: a `DTensor`, a collective's result on its way, a jagged tensor.

A region sees the local program: the ops on the tensors inside, collectives among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from remat.transforms.compat import ragged_again

# Tensors of these classes are no wrappers: a call is saved where that is asked of every tensor.
PLAIN = (torch.Tensor, torch.nn.Parameter)
_WRAPPING = ("torch.distributed", "torch.nested")
# Classes that were met, and whether they are such wrappers.
_wrappers: dict[type, bool] = {}


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class wrap local tensors, and tell of them."""
    known = _wrappers.get(kind)
    if known is None:
        known = _wrappers[kind] = any(
            base.__module__.startswith(_WRAPPING) and "__tensor_flatten__" in vars(base)
            for base in kind.__mro__
        )
    return known


def wraps(tensor: Any) -> bool:
    """Whether a tensor is such a wrapper."""
    return type(tensor) not in PLAIN and is_wrapper(type(tensor))


def local_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors of this process behind `tensors`, which may be wrappers of wrappers."""
    for tensor in tensors:
        if wraps(tensor):
            attributes: Any = wrapped_by(tensor)
            yield from local_tensors(attributes)
        else:
            yield tensor


def wrapped_by(tensor: Any) -> list[torch.Tensor]:
    """What a wrapper wraps."""
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for part in inner if isinstance(part, torch.Tensor)]


def placements_of(tensor: Any) -> str | None:
    """How a tensor lies on its mesh, as `(Shard(dim=0), Replicate())`, None for one that lies on none."""
    placements = getattr(tensor, "placements", None) if wraps(tensor) else None
    return None if placements is None else str(placements)


class Wrapper:
    """What a wrapper is, without its tensors.

    Args:
        tensor: the wrapper.
        taken: says what stands for a local tensor from now on.

    Attributes:
        parts: those, in order.
    """

    __slots__ = ("_build", "_context", "_completed", "_names", "_nested", "_shape", "_stride", "parts")

    def __init__(self, tensor: Any, taken: Callable[[torch.Tensor], Any]) -> None:
        self._names, self._context = tensor.__tensor_flatten__()
        self._build, self._shape, self._stride = type(tensor), tensor.shape, tensor.stride()
        # Of a collective's result: whether somebody has waited for it.
        self._completed = getattr(tensor, "completed", None)
        self._nested: list[Any] = []  # per name: a wrapper, None for a local tensor, (value,) for all else
        self.parts: list[Any] = []
        for name in self._names:
            inner = getattr(tensor, name)
            if not isinstance(inner, torch.Tensor):
                self._nested.append((inner,))
            elif wraps(inner):
                self._nested.append(nested := Wrapper(inner, taken))
                self.parts += nested.parts
            else:
                self._nested.append(None)
                self.parts.append(taken(inner))

    def around(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """The wrapper around other local tensors."""
        return self._around(iter(parts))

    def _around(self, parts: Iterator[torch.Tensor]) -> torch.Tensor:
        inner = {}
        for name, nested in zip(self._names, self._nested, strict=True):
            if nested is None:
                inner[name] = next(parts)
            else:
                inner[name] = nested._around(parts) if isinstance(nested, Wrapper) else nested[0]
        build: Any = self._build
        if "_offsets" in inner:
            ragged_again(inner.get("_lengths", inner["_offsets"]), self._shape[self._context["ragged_idx"]])
        made = build.__tensor_unflatten__(inner, self._context, self._shape, self._stride)
        if self._completed is not None:
            made.completed = self._completed
        return made

    def signature(self) -> Any:
        """What is alike for wrappers that are alike."""
        inner = [n.signature() if isinstance(n, Wrapper) else n for n in self._nested]
        # (A jagged tensor has a symbol of its own among its sizes.)
        sizes = tuple([n for n in (*self._shape, *self._stride) if type(n) is int])
        return self._build, sizes, self._completed, str(self._context), str(inner)
