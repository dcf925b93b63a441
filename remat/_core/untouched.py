"""Looking leaves no trace: what a function can reach is noted before it is run for a look, and put back.

A copy of a model would be safer and cannot be had: functions, locks and files have none. So the containers,
attributes, globals and caches in reach are noted (one level each, nothing is copied deep), and what is
another thing afterwards is put back. Tensors' memory is the business of whoever runs the function.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import gc
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from remat.transforms import flatten
from remat.transforms.compat import module_hooks
from remat.transforms.state import RandomState

_ATOMS = frozenset(
    (str, bytes, int, float, complex, bool, type(None), type(...), torch.dtype, torch.device, torch.Size)
)
# Whose code, and whose objects, hold nothing of the user's that a look could change.
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "remat", "numpy", "triton", "optree", "sympy"))
_PLAIN_OBJECTS = frozenset(("collections", "types", "argparse", "weakref", "queue", "_thread", "dataclasses"))
# More than this is no function's state but data, or a whole program.
_MOST, _LONG = 50_000, 10_000
_Cache = type(functools.lru_cache(abs))
_Local = threading.local
_MISSING: Any = object()


def _is_library(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


@contextlib.contextmanager
def untouched(*roots: Any) -> Iterator[Notes]:
    """Leave all that `roots` can reach as it is: attributes, containers, globals, caches, random numbers."""
    notes = Notes()
    # No hook that runs for every module is new afterwards, whoever set it.
    notes.visit(roots, *module_hooks)
    generators = RandomState([t for t in flatten(roots)[0] if isinstance(t, torch.Tensor)])
    streams = [(random.setstate, random.getstate())]
    if (numpy := sys.modules.get("numpy")) is not None:
        streams.append((numpy.random.set_state, numpy.random.get_state()))
    try:
        yield notes
    finally:
        generators.restore()
        for put_back, state in streams:
            put_back(state)
        notes.put_back()


class Notes:
    """What is in reach, as it is now.

    Attributes:
        tensors: those in reach.
        once: what cannot be put back, if it is in reach: an iterator, a parameter without a shape yet.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.once: Any = None
        self._notes: list[tuple[Callable[[Any, Any], None], Any, Any]] = []
        self._seen: dict[int, Any] = {}
        self._stack: collections.deque[Any] = collections.deque()  # what is nearest comes first

    def put_back(self) -> None:
        """Undo whatever was done since."""
        for put_back, where, before in reversed(self._notes):
            put_back(where, before)

    def visit(self, *roots: Any) -> None:
        """Note everything that `roots` lead to."""
        self._stack += roots
        while self._stack and len(self._seen) < _MOST:
            value = self._stack.popleft()
            if type(value) in _ATOMS or id(value) in self._seen:
                continue
            # Identities are only good while the objects live.
            self._seen[id(value)] = value
            self._look_at(value)

    def _note(self, put_back: Callable[[Any, Any], None], where: Any, before: Any) -> None:
        self._notes.append((put_back, where, before))

    def _look_at(self, value: Any) -> None:
        if isinstance(value, (dict, list, set, collections.deque, bytearray)):
            self._container(value)
        elif isinstance(value, (tuple, frozenset)):
            self._stack += value
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, _WRAPPERS):
            self._wrapper(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, torch.Tensor):
            if is_lazy(value):
                # It becomes another thing in the first call.
                self.once = value
            self.tensors.append(value)
            self._attributes(value)
        elif (kept := _state_of(value)) is not None:
            self._note(*kept)
        elif not isinstance(value, types.ModuleType):
            self._object(value)

    def _container(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, dict):
            self._note(_restore_dict, value, dict(value))
        else:
            self._note(_restore_others, value, list(value))
        if len(value) <= _LONG and not isinstance(value, bytearray):
            self._stack += value.values() if isinstance(value, dict) else value
        if not kind.__module__ == "builtins":
            self._attributes(value)

    def _attributes(self, value: Any) -> None:
        """The attributes of an object: in its dictionary, and in its slots."""
        with contextlib.suppress(AttributeError):
            held = value.__dict__ if isinstance(value, _Local) else object.__getattribute__(value, "__dict__")
            if type(held) is dict:
                self._stack.append(held)
        for member in _slots(type(value)):
            self._note(_restore_slot, (member, value), found := _in_slot(member, value))
            self._stack.append(found)

    def _object(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, torch.nn.Module) or not _is_library(kind.__module__):
            self._attributes(value)
            self._stack.append(kind)
        elif kind.__module__ in _PLAIN_OBJECTS or kind.__module__.startswith("remat"):
            self._attributes(value)
        elif hasattr(kind, "__next__") and kind.__module__ != "_io":
            self.once = value

    def _class(self, kind: type) -> None:
        if _is_library(kind.__module__):
            return
        held = {k: v for k, v in vars(kind).items() if not k.startswith("__")}
        self._note(_restore_class, kind, held)
        self._stack += held.values()
        self._stack += [vars(kind).get("__call__"), *kind.__bases__]

    def _function(self, fn: types.FunctionType) -> None:
        for cell in fn.__closure__ or ():
            self._note(_restore_cell, cell, found := _in_cell(cell))
            self._stack.append(found)
        self._stack += [fn.__defaults__, fn.__kwdefaults__, fn.__dict__]
        if not _is_library(fn.__globals__.get("__name__")):
            names = list(_names(fn.__code__))
            spaces, met = [fn.__globals__], {id(fn.__globals__)}
            for space in spaces:
                found = {name: space.get(name, _MISSING) for name in names}
                self._note(_restore_names, space, found)
                modules = [v for v in found.values() if isinstance(v, types.ModuleType)]
                self._stack += [v for v in found.values() if v is not _MISSING]
                # `import state` makes what is in there as near as what is in this file.
                for module in modules:
                    if not _is_library(module.__name__) and id(vars(module)) not in met:
                        met.add(id(vars(module)))
                        spaces.append(vars(module))

    def _wrapper(self, value: Any) -> None:
        if isinstance(value, _Cache):
            self._note(_restore_cache, value, (_table(value), value.cache_info()))
            self._stack += vars(value).values()
        for name in ("__self__", "__func__", "func", "args", "keywords", "fget", "fset", "__wrapped__"):
            if (part := getattr(value, name, None)) is not None:
                self._stack.append(part)


_WRAPPERS = (types.MethodType, types.BuiltinFunctionType, functools.partial, functools.partialmethod)
_WRAPPERS += (functools.cached_property, property, classmethod, staticmethod, _Cache)


def _state_of(value: Any) -> tuple[Callable[[Any, Any], None], Any, Any] | None:
    """How to put back what is one thing with a state of its own: a generator of numbers, an array."""
    if isinstance(value, contextvars.ContextVar):
        # (One that has no value at all cannot be left so.)
        return None if _unset(value) else (contextvars.ContextVar.reset, value, value.set(value.get()))
    if isinstance(value, torch.Generator):
        return torch.Generator.set_state, value, value.get_state()
    if isinstance(value, random.Random):
        return random.Random.setstate, value, value.getstate()
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray):
        return (_restore_array, value, value.copy()) if value.size <= 100 * _LONG else None
    if isinstance(value, numpy.random.RandomState):
        return numpy.random.RandomState.set_state, value, value.get_state()
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return (lambda where, before: setattr(where, "state", before)), bits, bits.state
    return None


def _names(code: types.CodeType) -> Iterator[str]:
    """All names that code reads from its file, and of attributes, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[Any, ...]:
    members = [m for base in kind.__mro__ if not _is_library(base.__module__) for m in vars(base).values()]
    return tuple([m for m in members if isinstance(m, types.MemberDescriptorType)])


def _table(cache: Any) -> dict[Any, Any] | None:
    """A copy of what an unbounded `functools.cache` remembers; None for one with a bound."""
    table = _remembered(cache)
    return None if table is None else dict(table)


def _remembered(cache: Any) -> Any:
    if cache.cache_parameters()["maxsize"] is not None:
        return None
    tables = [t for t in gc.get_referents(cache) if type(t) is dict and t is not vars(cache)]
    return tables[0] if len(tables) == 1 else None


def _restore_cache(cache: Any, before: Any) -> None:
    entries, info = before
    if cache.cache_info() == info:
        return
    if entries and (table := _remembered(cache)) is not None:
        _restore_dict(table, entries)
    else:
        # What was in there is computed again when it is asked for.
        cache.cache_clear()


def _restore_dict(held: Any, before: dict[Any, Any]) -> None:
    kind: Any = collections.OrderedDict if isinstance(held, collections.OrderedDict) else dict
    if len(held) == len(before) and all(kind.get(held, k, _MISSING) is v for k, v in before.items()):
        return
    for key in [key for key in held if key not in before]:
        kind.__delitem__(held, key)
    if [*map(id, held)] != [*map(id, before)]:
        kind.clear(held)
    for key, value in before.items():
        if kind.get(held, key, _MISSING) is not value:
            kind.__setitem__(held, key, value)


def _restore_others(held: Any, before: list[Any]) -> None:
    if isinstance(held, bytearray):
        held[:] = bytes(before)
    elif len(held) != len(before) or any(a is not b for a, b in zip(held, before, strict=True)):
        kind: Any = next(k for k in (list, set, collections.deque) if isinstance(held, k))
        kind.clear(held)
        (kind.update if kind is set else kind.extend)(held, before)


def _in_slot(member: Any, value: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return _MISSING


def _restore_slot(where: Any, before: Any) -> None:
    if _in_slot(*where) is not before:
        member, value = where
        member.__delete__(value) if before is _MISSING else member.__set__(value, before)


def _restore_class(kind: type, before: dict[str, Any]) -> None:
    now = {k: v for k, v in vars(kind).items() if not k.startswith("__")}
    for name in now.keys() - before.keys():
        type.__delattr__(kind, name)
    for name, value in before.items():
        if now.get(name, _MISSING) is not value:
            type.__setattr__(kind, name, value)


def _in_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _restore_cell(cell: Any, before: Any) -> None:
    if _in_cell(cell) is not before:
        if before is _MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = before


def _restore_names(space: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _MISSING:
            space.pop(name, None)
        elif space.get(name, _MISSING) is not value:
            space[name] = value


def _unset(var: contextvars.ContextVar[Any]) -> bool:
    try:
        var.get()
    except LookupError:
        return True
    return False


def _restore_array(array: Any, before: Any) -> None:
    if array.flags.writeable:
        array[...] = before
