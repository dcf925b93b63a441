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


class LeftOut:
    """Stands for what is neither a tensor nor a constant: a group of processes, a collective, a storage."""


LEFT_OUT = LeftOut()


def without_objects(value: Any) -> Any:
    """Arguments or results of a collective as a tape may hold them: its handle holds on to its tensors."""
    if isinstance(value, (tuple, list)) and not isinstance(value, Meta):
        return type(value)([without_objects(v) for v in value])
    return LEFT_OUT if isinstance(value, torch.ScriptObject) else value
