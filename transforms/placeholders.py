"""Tensors made of metadata, whose numbers nobody reads."""

from __future__ import annotations

from typing import Any

import torch


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
    return tensor if dtype.is_floating_point or dtype.is_complex else tensor.zero_()


def stand_in(outs: Any) -> Any:
    """What stands in for the results of a skipped op, each in memory of its own.

    Values of a recomputation are told apart by their storages.
    """
    if isinstance(outs, Meta):
        return hollow(outs)
    return type(outs)([stand_in(v) for v in outs]) if isinstance(outs, (tuple, list)) else outs


class LeftOut:
    """Stands for what is neither a tensor nor a constant: a group of processes, a collective, a storage."""


LEFT_OUT = LeftOut()


def without_objects(value: Any) -> Any:
    """Arguments or results of a collective as a tape may hold them: its handle holds on to its tensors."""
    if isinstance(value, (tuple, list)) and not isinstance(value, Meta):
        return type(value)([without_objects(v) for v in value])
    return LEFT_OUT if isinstance(value, torch.ScriptObject) else value
