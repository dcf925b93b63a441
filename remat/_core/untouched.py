"""Looking leaves no trace: what a function can reach is noted before it is run for a look, and put back.

A copy of a model would be safer and cannot be had: functions, locks and files have none. So the containers,
attributes, globals and caches in reach are noted, one level each; nothing is copied deep. What is
another thing afterwards is put back. Tensors' memory is the business of whoever runs the function.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from remat._core.put_back import (
    MISSING,
    cached,
    in_cell,
    in_slot,
    is_unset,
    restore_array,
    restore_cache,
    restore_cell,
    restore_class,
    restore_dict,
    restore_names,
    restore_sequence,
    restore_slot,
)
from remat.transforms import flatten
from remat.transforms.compat import module_hooks
from remat.transforms.state import RandomState, switches_put_back

_ATOMS = frozenset(
    (str, bytes, int, float, complex, bool, type(None), type(...), torch.dtype, torch.device, torch.Size)
)
# Whose code, and whose objects, hold nothing of the user's that a look could change.
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "remat", "numpy", "triton", "optree", "sympy"))
_PLAIN_OBJECTS = frozenset(("collections", "types", "argparse", "weakref", "queue", "_thread", "dataclasses"))
# More than this is no function's state but data, or a whole program.
_MOST, _LONG, _BYTES = 50_000, 10_000, 1 << 26
_Cache = type(functools.lru_cache(abs))


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
        with switches_put_back():
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
        self._room = _BYTES
        self._notes: list[tuple[Callable[[Any, Any], Any], Any, Any]] = []
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

    def _note(self, put_back: Callable[[Any, Any], Any], where: Any, before: Any) -> None:
        self._notes.append((put_back, where, before))

    def _look_at(self, value: Any) -> None:
        # By its type: a proxy would do who knows what if it were asked for its class.
        kind = type(value)
        if issubclass(kind, (dict, list, set, collections.deque)):
            self._container(value)
        elif issubclass(kind, (tuple, frozenset)):
            self._stack += tuple.__iter__(value) if issubclass(kind, tuple) else value
        elif issubclass(kind, types.FunctionType):
            self._function(value)
        elif issubclass(kind, _WRAPPERS):
            self._wrapper(value)
        elif issubclass(kind, type):
            self._class(value)
        elif issubclass(kind, torch.Tensor):
            if is_lazy(value):
                # It becomes another thing in the first call.
                self.once = value
            self.tensors.append(value)
            self._attributes(value)
        elif (kept := self._state_of(value)) is not None:
            self._note(*kept)
        elif not issubclass(kind, types.ModuleType):
            self._object(value)

    def _container(self, value: Any) -> None:
        if len(value) <= 100 * _LONG:
            is_dict = issubclass(type(value), dict)
            before: Any = dict(value) if is_dict else list(value)
            self._note(restore_dict if is_dict else restore_sequence, value, before)
            if len(value) <= _LONG:
                self._stack += before.values() if is_dict else before
        if type(value).__module__ != "builtins":
            self._attributes(value)

    def _state_of(self, value: Any) -> tuple[Callable[[Any, Any], Any], Any, Any] | None:
        """How to put back what is one thing with a state of its own: a generator of numbers, an array."""
        kind = type(value)
        if kind is contextvars.ContextVar:
            # (One that has no value at all cannot be left so.)
            return None if is_unset(value) else (contextvars.ContextVar.reset, value, value.set(value.get()))
        if issubclass(kind, torch.Generator):
            return torch.Generator.set_state, value, value.get_state()
        if issubclass(kind, random.Random):
            return random.Random.setstate, value, value.getstate()
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and issubclass(kind, numpy.random.RandomState):
            return numpy.random.RandomState.set_state, value, value.get_state()
        if numpy is not None and issubclass(kind, numpy.random.Generator):
            bits = value.bit_generator
            return (lambda where, before: setattr(where, "state", before)), bits, bits.state
        array = numpy is not None and issubclass(kind, numpy.ndarray)
        size = value.nbytes if array else len(value) if kind is bytearray else None
        if size is None or size > self._room:
            return None
        # More than a little is data, which nobody writes to.
        self._room -= size
        return restore_array, value, value.copy()

    def _attributes(self, value: Any) -> None:
        """The attributes of an object: in its dictionary, and in its slots."""
        with contextlib.suppress(AttributeError):
            # (What a thread has there only it can see.)
            local = issubclass(type(value), threading.local)
            held = value.__dict__ if local else object.__getattribute__(value, "__dict__")
            if type(held) is dict:
                self._stack.append(held)
        for member in _slots(type(value)):
            self._note(restore_slot, (member, value), found := in_slot(member, value))
            self._stack.append(found)

    def _object(self, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, torch.nn.Module) or not _is_library(kind.__module__):
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
        self._note(restore_class, kind, held)
        self._stack += held.values()
        self._stack += [vars(kind).get("__call__"), *kind.__bases__]

    def _function(self, fn: types.FunctionType) -> None:
        for cell in fn.__closure__ or ():
            self._note(restore_cell, cell, found := in_cell(cell))
            self._stack.append(found)
        self._stack += [fn.__defaults__, fn.__kwdefaults__, fn.__dict__]
        if not _is_library(fn.__globals__.get("__name__")):
            names = list(_names(fn.__code__))
            spaces, met = [fn.__globals__], {id(fn.__globals__)}
            for space in spaces:
                found = {name: space.get(name, MISSING) for name in names}
                self._note(restore_names, space, found)
                modules = [v for v in found.values() if isinstance(v, types.ModuleType)]
                self._stack += [v for v in found.values() if v is not MISSING]
                # `import state` makes what is in there as near as what is in this file.
                for module in modules:
                    if not _is_library(module.__name__) and id(vars(module)) not in met:
                        met.add(id(vars(module)))
                        spaces.append(vars(module))

    def _wrapper(self, value: Any) -> None:
        if isinstance(value, _Cache):
            self._note(restore_cache, value, (cached(value), value.cache_info()))
            self._stack += vars(value).values()
        for name in ("__self__", "__func__", "func", "args", "keywords", "fget", "fset", "__wrapped__"):
            if (part := getattr(value, name, None)) is not None:
                self._stack.append(part)


_WRAPPERS = (types.MethodType, types.BuiltinFunctionType, functools.partial, functools.partialmethod)
_WRAPPERS += (functools.cached_property, property, classmethod, staticmethod, _Cache)


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
