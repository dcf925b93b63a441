"""Tensors made of metadata, whose numbers nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Meta(tuple):
    """(shape, stride, dtype, device) of a tensor; a class of its own, so that no value looks like one."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{str(self[2]).removeprefix('torch.')}{list(self[0])}"


def mapped(kind: Any, function: Callable[[Any], Any], value: Any) -> Any:
    """Arguments or results of an op, with `function` of every `kind` among them."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (tuple, list)) and not isinstance(value, Meta):
        return type(value)([mapped(kind, function, v) for v in value])
    return {k: mapped(kind, function, v) for k, v in value.items()} if isinstance(value, dict) else value


def without_data(outs: Any) -> Any:
    """Results as metadata, shown as tensors of the meta device."""

    def shown(meta: Meta) -> torch.Tensor:
        shape, stride, dtype, _ = meta
        if stride is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    return mapped(Meta, shown, outs)


class LeftOut:
    """Stands for what is neither a tensor nor a constant: a group of processes, a collective, a storage."""


LEFT_OUT = LeftOut()


def without_objects(value: Any) -> Any:
    """Arguments or results of a collective as a tape may hold them: its handle holds on to its tensors."""
    return mapped(torch.ScriptObject, lambda _: LEFT_OUT, value)
