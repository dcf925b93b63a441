"""Numbers for objects, where only plain constants get through: from what Dynamo traces to trace time."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

_registered: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(thing: Any) -> str:
    """A number by which `thing` can be found as long as it lives; a string, as Dynamo changes integers."""
    number = str(next(_numbers))
    _registered[number] = thing
    return number


def numbered(number: str) -> Any:
    """The object that `register` gave this number."""
    return _registered[number]
