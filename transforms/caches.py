"""What is remembered: so much and no more, and without keeping alive what it is remembered of."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(OrderedDict[K, V]):
    """A dict of at most `room` entries: what was not asked for longest goes.

    Asking by `recall` or `made` counts. `[]` and `get` are a plain dict's and as fast; a table that is read
    by those alone loses its oldest entry.
    """

    def __init__(self, room: int, entries: Iterable[tuple[K, V]] = ()) -> None:
        self.room = room
        super().__init__(entries)

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self.room:
            self.popitem(last=False)

    def recall(self, key: K) -> V | None:
        """The value of `key`, which counts as used now; None where there is none."""
        try:
            value = self[key]
            self.move_to_end(key)
        except KeyError:
            # Another thread may have taken it out between the two lines.
            return None
        return value

    def made(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, made now where there is none."""
        found = self.recall(key)
        if found is None:
            found = self[key] = make()
        return found

    # Two caches are never one because they happen to hold the same.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class Identity(weakref.ref[Any]):
    """A key that stands for one object and does not hold it: equal to others of that object, while it lives.

    (A plain weak reference compares the objects, which may have no hash, or mean more than themselves.)
    """

    __slots__ = ("number",)

    number: int

    def __new__(cls, thing: Any) -> Identity:
        self = super().__new__(cls, thing)
        self.number = id(thing)
        return self

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Identity) or self.number != other.number:
            return False
        # A number is given anew after its object's death.
        mine = self()
        return mine is not None and mine is other()


class Key:
    """A tuple whose hash is reckoned once: for what is long and looked up often."""

    __slots__ = ("_hash", "parts")

    def __init__(self, *parts: Hashable) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Key) and self._hash == other._hash and self.parts == other.parts


# -- numbers for objects, where only plain constants get through: from what Dynamo traces to trace time ------

# What is equal to one of these has its number.
_interned: BoundedCache[Any, str] = BoundedCache(1024)
# The objects that `register` gave numbers.
registered: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(thing: Any) -> str:
    """A number by which `thing` can be found as long as it lives; a string, as Dynamo changes integers."""
    number = str(next(_numbers))
    registered[number] = thing
    return number


def intern(thing: Any) -> str:
    """The number of everything equal to `thing`; `register` where it has no hash.

    Many others may be interned meanwhile, and the first that was equal be forgotten: whoever keeps the number
    keeps `registered[number]` too.
    """
    try:
        return _interned.made(thing, lambda: register(thing))
    except TypeError:
        return register(thing)
