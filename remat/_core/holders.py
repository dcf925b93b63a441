"""What Python can hold a value in: how it is read, with no method of the user's, and written again."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import types
from collections.abc import Iterator
from typing import Any

import torch

MISSING: Any = object()
CACHE = type(functools.lru_cache(abs))
_CONTAINERS = (dict, list, set, collections.deque)
# What is not looked into: it leads to the whole program.
_PROGRAM = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType)
# More objects than this are data.
_MOST = 5_000


# What is held: pairs of a place and a value. Places are told apart by identity: a key may be a tensor, which
# is compared elementwise.
_Held = list[tuple[Any, Any]]


class Holding:
    """One place, as it is now: a dict, a list, slots of an object, cells of a function, names of a file."""

    __slots__ = ("before", "where")

    def __init__(self, where: Any) -> None:
        self.where = where
        self.before = self.held()

    def held(self) -> _Held:
        """What is there now."""
        raise NotImplementedError

    def write(self, held: _Held) -> None:
        """Let this be there."""
        raise NotImplementedError

    def values(self) -> list[Any]:
        """The values that were there."""
        return [value for _, value in self.before if value is not MISSING]

    def new(self) -> list[Any]:
        """The values that were not there before."""
        old = set(map(id, self.values()))
        return [value for _, value in self.held() if value is not MISSING and id(value) not in old]

    def restore(self) -> None:
        """Let the same be there as before, in its order."""
        now, before = self.held(), self.before
        same = len(now) == len(before) and all(
            a is c and b is d for (a, b), (c, d) in zip(now, before, strict=True)
        )
        if not same:
            self.write(before)


class Items(Holding):
    """A dict, by its items; of a subclass of a dict no method is asked."""

    def held(self) -> _Held:
        return list(_kind(self.where).items(self.where))

    def write(self, held: _Held) -> None:
        kind = _kind(self.where)
        kind.clear(self.where)
        for key, value in held:
            kind.__setitem__(self.where, key, value)


class Elements(Holding):
    """A list, a set or a deque."""

    def held(self) -> _Held:
        return [(None, value) for value in _base(self.where).__iter__(self.where)]

    def write(self, held: _Held) -> None:
        kind = _base(self.where)
        kind.clear(self.where)
        (kind.update if kind is set else kind.extend)(self.where, [value for _, value in held])


class Slots(Holding):
    """The slots of an object: (member of its class, ...) with it."""

    def held(self) -> _Held:
        members, value = self.where
        return [(member, _in_slot(member, value)) for member in members]

    def write(self, held: _Held) -> None:
        for member, value in held:
            # What cannot be written was not: Cython's functions show such a member as another int each time.
            with contextlib.suppress(AttributeError):
                if value is MISSING:
                    member.__delete__(self.where[1])
                else:
                    member.__set__(self.where[1], value)


class Cells(Holding):
    """The cells that a function closes over."""

    def held(self) -> _Held:
        return [(cell, in_cell(cell)) for cell in self.where]

    def write(self, held: _Held) -> None:
        for cell, value in held:
            if value is not MISSING:
                cell.cell_contents = value
            elif in_cell(cell) is not MISSING:
                del cell.cell_contents


class FileNames(Holding):
    """The namespace of a file, and which names a function reads there."""

    def held(self) -> _Held:
        space, names = self.where
        return [(name, space.get(name, MISSING)) for name in names]

    def write(self, held: _Held) -> None:
        for name, value in held:
            if value is MISSING:
                self.where[0].pop(name, None)
            else:
                self.where[0][name] = value


class Attributes(Holding):
    """The attributes of a class."""

    def held(self) -> _Held:
        return [(k, v) for k, v in vars(self.where).items() if not k.startswith("__")]

    def write(self, held: _Held) -> None:
        now, before = dict(self.held()), dict(held)
        for name in now.keys() - before.keys():
            type.__delattr__(self.where, name)
        for name, value in held:
            if now.get(name, MISSING) is not value:
                type.__setattr__(self.where, name, value)


class Cached(Holding):
    """What an `lru_cache` remembers."""

    def held(self) -> _Held:
        # With a bound it shows what it has remembered, without one the table of that.
        shown = gc.get_referents(self.where)
        tables = [table for table in shown if type(table) is dict and table is not vars(self.where)]
        return [(None, value) for value in (*shown, *[v for table in tables for v in table.values()])]

    def write(self, held: _Held) -> None:
        # Its table is its own. What was in there is computed again when it is asked for.
        self.where.cache_clear()


def container(value: Any) -> Holding:
    """A dict, list, set or deque as a holder."""
    return Items(value) if issubclass(type(value), dict) else Elements(value)


def in_cell(cell: Any) -> Any:
    """What a cell of a closure holds, `MISSING` for nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def leads_to(values: list[Any], wanted: Any) -> bool:
    """Whether one of the values is, or holds, a tensor that is `wanted`, or a node of autograd."""
    stack, seen = list(values), set[int]()
    while stack and len(seen) < _MOST:
        value = stack.pop()
        kind = type(value)
        if id(value) in seen or issubclass(kind, _PROGRAM):
            continue
        seen.add(id(value))
        if issubclass(kind, torch.Tensor):
            if wanted(value):
                return True
        elif kind.__module__ == "torch.autograd.function" or hasattr(kind, "next_functions"):
            # What it has saved is not for us to see.
            return True
        elif issubclass(kind, types.FunctionType):
            stack += [*map(in_cell, value.__closure__ or ()), value.__defaults__, value.__dict__]
        elif kind not in (str, bytes, int, float, bool):
            stack += gc.get_referents(value)
    return False


def _kind(held: Any) -> Any:
    return collections.OrderedDict if issubclass(type(held), collections.OrderedDict) else dict


def _base(held: Any) -> Any:
    return next(kind for kind in _CONTAINERS if issubclass(type(held), kind))


def _in_slot(member: Any, value: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return MISSING


def names_in(code: types.CodeType) -> Iterator[str]:
    """All names that code reads from its file, and of attributes, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
