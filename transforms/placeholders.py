"""Tensors made of metadata, whose numbers nobody reads."""

from __future__ import annotations

from typing import Any

import torch

from remat.transforms.compat import memory_is_real


class Meta(tuple):
    """(shape, stride, dtype, device) of a tensor; a class of its own, so that no value looks like one."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{str(self[2]).removeprefix('torch.')}{list(self[0])}"


def without_data(outs: Any) -> Any:
    """Results as metadata, shown as tensors of the meta device."""
    if isinstance(outs, Meta):
        shape, stride, dtype, _ = outs
        if stride is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if isinstance(outs, (tuple, list)):
        return type(outs)([without_data(v) for v in outs])
    return outs


def hollow(meta: Meta) -> torch.Tensor:
    """A tensor of this metadata whose numbers nobody reads.

    Its memory is real: user code may still look at it in ways torch does not see, which must not crash. Nor
    must a derivative that comes to nothing in the end, if these are indices for it: they are zeros.
    """
    shape, stride, dtype, device = meta
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return tensor if _is_inexact(dtype) else tensor.zero_()


class Separate:
    """Makes what stands in for the results of skipped ops, each in memory of its own."""

    def __call__(self, outs: Any) -> Any:
        if isinstance(outs, Meta):
            return self.one(outs)
        return type(outs)([self(v) for v in outs]) if isinstance(outs, (tuple, list)) else outs

    def one(self, meta: Meta) -> torch.Tensor:
        return hollow(meta)


class Shared(Separate):
    """The same, in one memory as far as it goes: nothing may be concluded there from where a tensor lies."""

    def __init__(self) -> None:
        self.memory: dict[tuple[torch.device, bool], torch.UntypedStorage] = {}

    def one(self, meta: Meta) -> torch.Tensor:
        shape, stride, dtype, device = meta
        if stride is None:
            return hollow(meta)
        kind, size = (device, _is_inexact(dtype)), _bytes(meta)
        memory = self.memory.get(kind)
        if memory is None or memory.nbytes() < size:
            if device.type == "meta" or not memory_is_real():
                return hollow(meta)
            # Zeros, if they may be taken for indices.
            make = torch.empty if kind[1] else torch.zeros
            memory = self.memory[kind] = make(size, dtype=torch.uint8, device=device).untyped_storage()
        return torch.empty(0, dtype=dtype, device=device).set_(memory, 0, shape, stride)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _bytes(meta: Meta) -> int:
    shape, stride, dtype, _ = meta
    if stride is None or 0 in shape:
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * dtype.itemsize
