"""Numbers for objects, where only plain constants get through: from what Dynamo traces to trace time."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from remat.transforms.caches import BoundedCache

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
