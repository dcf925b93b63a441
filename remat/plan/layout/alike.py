"""Which blocks of a model are alike, so that one of them is traced for all."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch

from remat.transforms import local_tensors

_USUAL = frozenset(torch.nn.Module().__dict__)
_PLAIN = (bool, str, bytes, type(None), torch.dtype, torch.device)


def likeness(module: torch.nn.Module, *, numbers: bool) -> Hashable:
    """What blocks have in common that run the same ops: classes, flags, shapes, plain attributes.

    Without `numbers` two blocks count as alike that differ in those alone: layers are often numbered.
    """
    return tuple(_described(module, numbers))


def likeness_of_call(leaves: list[Any], spec: Any, *, numbers: bool) -> Hashable:
    """The same of the arguments that they are called with."""
    return str(spec), tuple([_value(leaf, numbers) for leaf in leaves])


def _described(module: torch.nn.Module, numbers: bool) -> Iterator[Hashable]:
    for name, part in module.named_modules():
        yield name, type(part), part.training, len(part._forward_hooks), len(part._forward_pre_hooks)
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            yield key, None if tensor is None else _meta(tensor)
        for key, value in vars(part).items():
            if key not in _USUAL:
                yield key, _value(value, numbers)


def _value(value: Any, numbers: bool) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return _meta(value)
    if isinstance(value, (int, float, complex)):
        return type(value), value if numbers else None
    if isinstance(value, (tuple, list)):
        return type(value), tuple([_value(one, numbers) for one in value])
    if isinstance(value, dict):
        return dict, tuple([(key, _value(one, numbers)) for key, one in value.items()])
    # Configs and functions are shared by layers; what is not counts as different, which only costs time.
    return id(value)


def _meta(tensor: torch.Tensor) -> Hashable:
    part = next(local_tensors([tensor]))
    return type(tensor), part.shape, part.stride(), part.dtype, tensor.requires_grad
