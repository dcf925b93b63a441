"""How one thing that a look may have changed is put back: a container, a slot, a cell, a cache."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import gc
from typing import Any

MISSING: Any = object()


def cached(cache: Any) -> dict[Any, Any]:
    """What an `lru_cache` remembers: its table, copied."""
    return dict(_table(cache))


def _table(cache: Any) -> dict[Any, Any]:
    tables = [t for t in gc.get_referents(cache) if type(t) is dict and t is not vars(cache)]
    return tables[0] if len(tables) == 1 else {}


def restore_cache(cache: Any, before: Any) -> None:
    """Let an `lru_cache` remember what it remembered, and no more."""
    entries, info = before
    if cache.cache_info() == info:
        return
    table = _table(cache)
    if not entries or any(key not in table for key in entries):
        # What was in there is computed again when it is asked for.
        cache.cache_clear()
    for key in [key for key in table if key not in entries]:
        # (One with a bound keeps a list of its entries, and passes over those that are gone.)
        del table[key]


def held_in(held: Any) -> dict[Any, Any]:
    """What a dict holds, in its order.

    A subclass is not asked: transformers' tables of models import one for every key that is looked up.
    """
    return dict(_kind(held).items(held))


def _kind(held: Any) -> Any:
    return collections.OrderedDict if isinstance(held, collections.OrderedDict) else dict


def restore_dict(held: Any, before: dict[Any, Any]) -> None:
    """Let a dict hold what it held, in its order."""
    kind, now = _kind(held), held_in(held)
    if len(now) == len(before) and all(now.get(k, MISSING) is v for k, v in before.items()):
        return
    for key in [key for key in now if key not in before]:
        kind.__delitem__(held, key)
    if [*map(id, held_in(held))] != [*map(id, before)]:
        kind.clear(held)
    for key, value in before.items():
        if kind.get(held, key, MISSING) is not value:
            kind.__setitem__(held, key, value)


def restore_sequence(held: Any, before: Any) -> None:
    """Let a list, a set or a deque hold what it held."""
    if len(held) != len(before) or any(a is not b for a, b in zip(held, before, strict=True)):
        kind: Any = next(k for k in (list, set, collections.deque) if isinstance(held, k))
        kind.clear(held)
        add: Any = kind.update if kind is set else kind.extend
        add(held, before)


def in_slot(member: Any, value: Any) -> Any:
    """What a slot of an object holds, `MISSING` for nothing."""
    try:
        return member.__get__(value)
    except AttributeError:
        return MISSING


def restore_slot(where: Any, before: Any) -> None:
    """Let a slot hold what it held."""
    if in_slot(*where) is not before:
        member, value = where
        # What cannot be written was not: Cython's functions show such a member as another int each time.
        with contextlib.suppress(AttributeError):
            member.__delete__(value) if before is MISSING else member.__set__(value, before)


def restore_class(kind: type, before: dict[str, Any]) -> None:
    """Let a class have the attributes that it had."""
    now = {k: v for k, v in vars(kind).items() if not k.startswith("__")}
    for name in now.keys() - before.keys():
        type.__delattr__(kind, name)
    for name, value in before.items():
        if now.get(name, MISSING) is not value:
            type.__setattr__(kind, name, value)


def in_cell(cell: Any) -> Any:
    """What a cell of a closure holds, `MISSING` for nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def restore_cell(cell: Any, before: Any) -> None:
    """Let a cell hold what it held."""
    if in_cell(cell) is not before:
        if before is MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = before


def restore_names(space: dict[str, Any], before: dict[str, Any]) -> None:
    """Let these names of a module mean what they meant."""
    for name, value in before.items():
        if value is MISSING:
            space.pop(name, None)
        elif space.get(name, MISSING) is not value:
            space[name] = value


def is_unset(var: contextvars.ContextVar[Any]) -> bool:
    """Whether a context variable has no value here."""
    try:
        var.get()
    except LookupError:
        return True
    return False


def restore_array(array: Any, before: Any) -> None:
    """Let an array of numbers, or of bytes, hold what it held."""
    if isinstance(array, bytearray):
        array[:] = before
    elif array.flags.writeable:
        array[...] = before
