"""Results of a region that lie in one memory.

A node of autograd returns tensors that know nothing of each other: what is written to one of them later is
seen in the others, but not by their derivatives. So of results that look into each other one leaves the
node, and the others are made of it outside, where autograd follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from remat.transforms.compat import functions_as_they_are, graph_storage, is_wrapped, unwrap_once, unwrapped

Tensors = Sequence[torch.Tensor]


class AliasSpec(NamedTuple):
    """A view of another result: which one, and shape, stride and start there. Without a stride it has all of
    its elements in their order; without a shape it is that result itself."""

    base: int
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    start: Any = 0


def looks(tensors: Tensors) -> list[AliasSpec | None]:
    """For every result, how to see it in another one that holds all of it; None where it stands alone."""
    found: list[AliasSpec | None] = [None] * len(tensors)
    if len(tensors) < 2:
        return found
    together: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.layout is torch.strided:
            bottom = unwrapped(tensor)
            together.setdefault(graph_storage(bottom), []).append(i)
    # Asked of tensors whose attributes a torch-function mode would take for calls of the user's.
    with functions_as_they_are():
        for group in together.values():
            whole = [i for i in group if tensors[i].is_contiguous()]
            if len(group) > 1 and whole:
                base = max(whole, key=lambda i: tensors[i].numel())
                for i in group:
                    found[i] = None if i == base else _look(tensors, base, i)
    return found


def _look(tensors: Tensors, base: int, at: int) -> AliasSpec | None:
    whole, part = tensors[base], tensors[at]
    if part is whole:
        return AliasSpec(base)
    start = part.storage_offset() - whole.storage_offset()
    last = start + sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True))
    inside = part.numel() and start >= 0 and last < whole.numel()
    if not inside or part.dtype != whole.dtype or not _follows(part, whole):
        return None
    if part.numel() == whole.numel() and part.is_contiguous():
        return AliasSpec(base, tuple(part.shape))
    return AliasSpec(base, tuple(part.shape), part.stride(), start)


def _follows(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether autograd, at every level, has the one for a view of the other, derivatives and all: not so for
    what was detached, or looked at without gradients."""
    while part.requires_grad == whole.requires_grad and (part.grad_fn is None) == (whole.grad_fn is None):
        wrapped = is_wrapped(part)
        if wrapped != is_wrapped(whole):
            return False
        if not wrapped:
            bases = [t if t._base is None else t._base for t in (part, whole)]
            return bases[0] is bases[1]
        part, whole = unwrap_once(part), unwrap_once(whole)
    return False


def bases(tensors: Tensors, looks: Sequence[AliasSpec | None]) -> tuple[torch.Tensor, ...]:
    """Those results that leave the node."""
    return tuple([t for t, look in zip(tensors, looks, strict=True) if look is None])


def rebuild(made: Tensors, looks: Sequence[AliasSpec | None]) -> list[torch.Tensor]:
    """All results, given those that left the node."""
    left = iter(made)
    results = [next(left) if look is None else None for look in looks]
    return [_rebuilt(results, look) if t is None else t for t, look in zip(results, looks, strict=True)]


def _rebuilt(results: Sequence[torch.Tensor | None], look: AliasSpec | None) -> torch.Tensor:
    assert look is not None
    base = results[look.base]
    assert base is not None
    if look.shape is None:
        return base
    # Batched results may be laid out in another way than the function made them.
    base = base.contiguous()
    if look.stride is None:
        return base.view(look.shape)
    shape, stride = look.shape, look.stride
    order = sorted(range(len(shape)), key=lambda d: stride[d], reverse=True)
    sizes = [shape[d] for d in order]
    if any(stride[d] != math.prod(sizes[i + 1 :]) for i, d in enumerate(order)):
        return base.as_strided(shape, stride, base.storage_offset() + look.start)
    # Compilers refuse to write into what as_strided gives.
    part = base.view(-1).narrow(0, look.start, math.prod(sizes)).view(sizes)
    return part.permute(sorted(range(len(order)), key=order.__getitem__))
