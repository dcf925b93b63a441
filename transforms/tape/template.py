"""Templates of calls: the arguments of an op with numbers in the place of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from remat.transforms.pytree import constants_alike


class Ref(int):
    """Stands for the value of this number in the template of a call: 0, 1, ... are results of ops, in their
    order; -1, -2, ... come from outside."""

    __slots__ = ()


def same_constants(want: Any, value: Any) -> bool:
    """Whether the arguments of a call are those of the forward, tensors aside."""
    if type(want) is Ref or isinstance(value, torch.Tensor):
        return type(want) is Ref and isinstance(value, torch.Tensor)
    if isinstance(want, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(want) == len(value) and all(map(same_constants, want, value))
    if isinstance(want, dict):
        return want.keys() == value.keys() and all(same_constants(want[k], value[k]) for k in want)
    return type(want) is not type(value) or constants_alike(want, value)


def refs_in(template: Any) -> list[int]:
    """The numbers in a template, in their order."""
    found: list[int] = []
    stack = [template]
    while stack:
        value = stack.pop()
        if type(value) is Ref:
            found.append(value)
        elif isinstance(value, (list, tuple)):
            stack.extend(reversed(value))
        elif isinstance(value, dict):
            stack.extend(reversed(value.values()))
    return found


def pairs(want: Any, value: Any) -> Iterator[tuple[int, Any]]:
    """The numbers in a template, each with the tensor in its place."""
    if type(want) is Ref:
        yield want, value
    elif isinstance(want, (tuple, list)):
        # (Nobody has compared their lengths under determinism_check="none".)
        for one, other in zip(want, value, strict=False):
            yield from pairs(one, other)
    elif isinstance(want, dict):
        for key in want.keys() & value.keys():
            yield from pairs(want[key], value[key])
