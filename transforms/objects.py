"""What objects of the user's hold, read past every method of theirs.

A class may define any method: `__len__` that raises, `__iter__` that loads a file, `__getattr__` that answers
for everything, `__class__` that lies. Plain torch asks none of them about the objects that a function meets,
so neither does the library. It reads by the slots of built-in types (`list.__iter__`, the descriptors of
`__dict__` and of slots), makes instances and subclasses past constructors, and takes the class of an object
from `type` alone. An object that none of this looks into is opaque, and counts by its identity.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import threading
import types
import weakref
from _abc import _abc_init  # type: ignore[attr-defined]  # pyright: ignore
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard, TypeVar

import torch

MISSING: Any = object()
_T = TypeVar("_T", bound=type)

# Of a class, past its metaclass.
mro: Callable[[type], tuple[type, ...]] = vars(type)["__mro__"].__get__
names_of: Callable[[type], types.MappingProxyType[str, Any]] = vars(type)["__dict__"].__get__

_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_ARGUMENTS = vars(BaseException)["args"]
_ITEMS: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    collections.deque: collections.deque.__iter__,
}
_LENGTHS: dict[type, Callable[[Any], int]] = {kind: kind.__len__ for kind in _ITEMS}
_CONTAINERS = tuple(_ITEMS)


class _Layout:
    """How the instances of a class are read: `table` gives their `__dict__`, `slots` what lies beside it."""

    __slots__ = ("base", "kind", "slots", "table")

    def __init__(self, kind: type) -> None:
        # Found by its number, since a metaclass may define a hash; held weakly, and forgotten with the class.
        number = id(kind)
        self.kind = weakref.ref(kind, lambda _: _layouts.pop(number, None))
        line = mro(kind)
        tables = (names_of(base).get("__dict__") for base in line)
        found = next((t for t in tables if isinstance(t, _DESCRIPTORS)), None)
        if not issubclass(kind, threading.local):
            self.table = None if found is None else found.__get__
        elif kind.__init__ is object.__init__:
            self.table = _of_this_thread
        else:
            self.table = None  # the first look in a thread runs the class's own `__init__`
        named = [base for base in line if "__slots__" in names_of(base) or base is BaseException]
        members = [m for base in named for m in names_of(base).values()]
        self.slots = tuple([m for m in members if type(m) is types.MemberDescriptorType or m is _ARGUMENTS])
        self.base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)


def _of_this_thread(value: Any) -> Any:
    return threading.local.__getattribute__(value, "__dict__")


_layouts: dict[int, _Layout] = {}


def _layout(kind: type) -> _Layout:
    found = _layouts.get(id(kind))
    if found is None or found.kind() is not kind:
        found = _layouts[id(kind)] = _Layout(kind)
    return found


name_of: Callable[[type], str] = vars(type)["__qualname__"].__get__


def is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    """`isinstance` by the class that an object has, not by the `__class__` that it shows."""
    return issubclass(type(value), kind)


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether `value` is a tensor."""
    return issubclass(type(value), torch.Tensor)


def is_module(value: Any) -> TypeGuard[torch.nn.Module]:
    """Whether `value` is a module, past its `__init__` of torch's."""
    return issubclass(type(value), torch.nn.Module)


def container_of(value: Any) -> type | None:
    """The built-in container that a class is, or derives from."""
    return _layout(type(value)).base


def length(value: Any) -> int:
    """How many items a container has, whatever its class says."""
    return _LENGTHS[_layout(type(value)).base or list](value)


def items(value: Any) -> list[Any]:
    """What a container holds, of a dict the values; nothing for what is none."""
    base = _layout(type(value)).base
    if base is not None:
        return list(_ITEMS[base](value))
    if type(value) is types.MappingProxyType:
        # Its methods are those of what it shows.
        return [one for shown in gc.get_referents(value) for one in items(shown)]
    return []


_PLAIN: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}


def plain_of(value: Any) -> Any:
    """The number or the text that an instance of a class of the user's derives from, such as an enum's; None
    for another object, and for what is plain itself."""
    kind = type(value)
    base = next((base for base in _PLAIN if kind is not base and issubclass(kind, base)), None)
    return None if base is None or kind is bool else _PLAIN[base](value)


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes that an object has of its own; None where it has no place for them."""
    table = _layout(type(value)).table
    if table is None:
        return None
    with contextlib.suppress(AttributeError):
        found = table(value)
        return found if issubclass(type(found), dict) else None
    return None


def slots(value: Any) -> tuple[Any, ...]:
    """The slots of an object's class and its bases, as the descriptors that read and write them."""
    return _layout(type(value)).slots


def in_slot(slot: Any, value: Any) -> Any:
    """What a slot of an object holds, `MISSING` for nothing."""
    try:
        return slot.__get__(value)
    except (AttributeError, ValueError):  # ValueError: a cell that is empty
        return MISSING


def held(value: Any) -> list[Any]:
    """All that an object holds: items, attributes, and what is in slots."""
    layout = _layout(type(value))
    found = items(value)
    if layout.table is not None and (table := attributes(value)) is not None:
        found += dict.values(table)
    if layout.slots:
        found += [one for slot in layout.slots if (one := in_slot(slot, value)) is not MISSING]
    return found


# -- modules -----------------------------------------------------------------------------------------------


def tables_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A module's parameters, buffers and modules by name. TorchScript's lie elsewhere: then empty ones."""
    held = attributes(module) or {}
    found = [held.get(name) for name in ("_parameters", "_buffers", "_modules")]
    first, second, third = [table if isinstance(table, dict) else {} for table in found]
    return first, second, third


def modules_in(*modules: torch.nn.Module) -> list[torch.nn.Module]:
    """These modules and those in them, once each, every one before its own."""
    seen: dict[int, torch.nn.Module] = {}
    stack = list(reversed(modules))
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen[id(module)] = module
            children = list(dict.values(tables_of(module)[2]))
            stack += [child for child in reversed(children) if is_module(child)]
    return list(seen.values())


def named_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters of a module and of those in it by qualified name, then buffers, once each."""
    names, seen = [("", module)], dict[int, str]()
    parts: list[tuple[str, torch.nn.Module]] = []
    while names:
        prefix, part = names.pop()
        if id(part) not in seen:
            seen[id(part)] = prefix
            parts.append((prefix, part))
            children = [(f"{prefix}{name}.", c) for name, c in dict.items(tables_of(part)[2]) if is_module(c)]
            names += reversed(children)
    every = [(f"{p}{name}", t) for i in (0, 1) for p, m in parts for name, t in dict.items(tables_of(m)[i])]
    return list({id(t): (name, t) for name, t in reversed(every) if is_tensor(t)}.values())[::-1]


# -- making ------------------------------------------------------------------------------------------------


def blank(kind: type) -> Any:
    """An instance of `kind` that no constructor has seen."""
    # Of the built-in type that lays it out: `object` refuses to make a dict.
    base = next(base for base in mro(kind) if not base.__flags__ & ON_HEAP)
    make: Any = base.__new__
    return make(kind)


ON_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was made by a `class` statement


def copied(value: Any) -> Any:
    """Another instance that holds the same, made by no method of its class; None where there can be none."""
    kind = type(value)
    base = _layout(kind).base
    try:
        if base in (tuple, frozenset):
            made = base.__new__(kind, items(value))
        else:
            made = blank(kind)
            if base is dict:
                dict.update(made, dict.items(value))
            elif base is not None:
                (base.update if base is set else base.extend)(made, items(value))  # type: ignore[attr-defined]
    except TypeError:
        return None
    if (table := attributes(value)) is not None and (own := attributes(made)) is not None:
        dict.update(own, table)
    for slot in slots(value):
        if (found := in_slot(slot, value)) is not MISSING:
            slot.__set__(made, found)
    return made


def rebuilt(kind: type, parts: Iterable[Any], table: dict[str, Any] | None) -> Any:
    """A tuple of a class with these items and attributes, which its constructor has not seen."""
    made = tuple.__new__(kind, parts)
    if table and (own := attributes(made)) is not None:
        dict.update(own, table)
    return made


def unannounced(mixin: _T) -> _T:
    """Make `mixin`, the first base of subclasses of users' classes, keep these from hearing of them.

    (Not a base itself: then a module's layout would differ, and its class could not be exchanged.)
    """

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        """Nothing: a registry of the user's holds what the user has written."""

    mixin.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
    return mixin


def subclass(cls: type, mixin: type, about: dict[str, Any]) -> type:
    """A subclass of `mixin`, which is `unannounced`, and of `cls`: no registry or metaclass hears of it."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made = type.__new__(type(cls), cls.__name__, (mixin, cls), names | about)
    if any("_abc_impl" in names_of(base) for base in mro(cls)):
        # What `ABCMeta` does: else the two would share one memory of what is an instance of them.
        _abc_init(made)
    return made


def laid_out_as(cls: type, mixin: type) -> type:
    """The mixin of subclasses of `cls` that its instances may have as their class: another than `mixin` if a
    base without memory of its own (`abc.ABC`, `Generic`) comes first."""
    kind, first = cls, cls.__base__
    while first is not None and _memory(kind) == _memory(first):
        kind, first = first, first.__base__
    if first in (None, object) or _memory(first) != _memory(object):
        return mixin
    own = {name: value for name, value in names_of(mixin).items() if name not in ("__dict__", "__weakref__")}
    # (`Generic` refuses to be a base without parameters, by what was written as bases.)
    return type.__new__(type(first), mixin.__name__, (first, mixin), own | {"__orig_bases__": ()})


def _memory(cls: Any) -> tuple[int, int, int, int]:
    return cls.__basicsize__, cls.__itemsize__, cls.__dictoffset__, cls.__weakrefoffset__


def subclasses(cls: type) -> list[type]:
    """The classes that derive from `cls` itself and are alive."""
    return type.__subclasses__(cls)


def set_class(value: Any, cls: type) -> None:
    """Give an object another class, whatever it shows as its `__class__`."""
    vars(object)["__class__"].__set__(value, cls)
