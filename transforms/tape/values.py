"""What a forward computes from what: numbers for the tensors it meets, and how its ops are called."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from remat.transforms.tape.tape import tensors_in

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Unknown(Exception):
    """A tensor whose origin cannot be told, or something else that cannot be written down."""


class Ref(int):
    """Stands for the value of this number among the arguments of a call."""


class Makers:
    """Numbers of tensor objects. An id is reused once its tensor is gone, so each entry knows its own."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def get(self, tensor: torch.Tensor) -> int | None:
        found = self._at.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def set(self, tensor: torch.Tensor, at: int) -> None:
        self._at[id(tensor)] = weakref.ref(tensor), at


class Values:
    """Numbers for the tensors that a forward meets: 0, 1, ... for results of ops, -1, -2, ... from outside.

    Args:
        outside: all tensors from outside, None for one that is missing. They must stay alive meanwhile.
    """

    __slots__ = ("_made", "_outer", "count")

    def __init__(self, outside: Sequence[torch.Tensor | None]) -> None:
        self.count = 0
        self._outer = {id(t): -1 - i for i, t in enumerate(outside)}
        self._made = Makers()

    def add(self, out: Any) -> None:
        """Number the tensors among an op's results."""
        if isinstance(out, torch.Tensor):
            self._made.set(out, self.count)
            self.count += 1
        else:
            for tensor in tensors_in(out):
                self.add(tensor)

    def same(self, func: Any, args: Any, out: Any) -> None:
        """Note what an op that computes nothing returned."""
        number = self.find(args[0]) if func in _ALIASES else None
        if number is not None:
            self._made.set(out, number)

    def find(self, tensor: torch.Tensor) -> int | None:
        """The number of this tensor object; None for one that came from nowhere."""
        number = self._made.get(tensor)
        return self._outer.get(id(tensor)) if number is None else number


class Calls:
    """Writes down how the ops of a forward are called.

    Attributes:
        made: each op's arguments and keyword arguments, with a `Ref` in the place of every tensor.
        first: the number of each op's first result.
        packed: the values that autograd saved; None for one that could not be told.
        complete: False once anything could not be written down.
    """

    def __init__(self, outside: Sequence[torch.Tensor | None]) -> None:
        self.values = Values(outside)
        self.made: list[tuple[Any, Any]] = []
        self.first: list[int] = []
        self.packed: list[int | None] = []
        self.complete = True

    def add(self, args: Any, kwargs: Any, out: Any) -> None:
        """Note a call and what it returned."""
        if not self.complete:
            return
        try:
            self.made.append((self._template(args), self._template(kwargs)))
        except Unknown:
            self.complete = False
            return
        self.first.append(self.values.count)
        self.values.add(out)

    def save(self, tensor: torch.Tensor) -> None:
        """Note a value that autograd saves."""
        self.packed.append(self.values.find(tensor))

    def _template(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = self.values.find(value)
            if number is None:
                raise Unknown
            return Ref(number)
        if isinstance(value, (tuple, list)):
            return type(value)([self._template(v) for v in value])
        if isinstance(value, dict):
            return {k: self._template(v) for k, v in value.items()}
        return value
