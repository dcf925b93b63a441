"""Numbers for objects, where only plain constants get through: from what Dynamo traces to trace time."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

# What is equal to one of these has its number.
_interned: dict[Any, str] = {}
# The objects that `register` gave numbers.
registered: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(thing: Any) -> str:
    """A number by which `thing` can be found as long as it lives; a string, as Dynamo changes integers."""
    number = str(next(_numbers))
    registered[number] = thing
    return number


def intern(thing: Any) -> str:
    """The number of everything equal to `thing`, for good; `register` where it has no hash."""
    try:
        number = _interned.get(thing)
    except TypeError:
        return register(thing)
    if number is None:
        number = _interned[thing] = register(thing)
    return number
