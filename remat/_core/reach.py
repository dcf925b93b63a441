"""What a look at a function isolates: the dictionaries of modules in reach, and random streams.

A copy of a model cannot be had: functions, locks and files have none. So a look runs on the user's objects.
What torch keeps in modules and parameters is put back after it. Other effects of the user's Python happen
once a look, as in a call: a counter counts, a registry is filled, `sys.modules` grows. One thing cannot stay
anywhere: a tensor that has no data, because the look ran without. What has come to hold one holds again
what it held before (`Reach.without`).
"""

from __future__ import annotations

import collections
import contextlib
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

from remat.transforms import (
    attributes,
    flatten,
    in_slot,
    is_a,
    is_tensor,
    items,
    length,
    names_of,
    slots,
)
from remat.transforms.closure import CONTENTS, Noted, names_in
from remat.transforms.compat import cached_weights
from remat.transforms.state import RandomState, switches_put_back

_ATOMS = frozenset(
    (str, bytes, int, float, complex, bool, type(None), type(...), torch.dtype, torch.device, torch.Size)
)
# Whose code, and whose objects, hold nothing of the user's that a look could change.
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "remat", "numpy", "triton", "optree", "sympy"))
_PLAIN_OBJECTS = frozenset(("collections", "types", "argparse", "weakref", "queue", "_thread", "dataclasses"))
# More than this is no function's state but data, or a whole program.
_MOST, _LONG = 50_000, 10_000
# What torch itself keeps in a module, each in a table.
_TABLES = frozenset(torch.nn.Module().__dict__)
_CACHE = type(functools.lru_cache(abs))


def is_library(module: Any) -> bool:
    """Whether objects and code of a module of this name hold no state of the user's."""
    return type(module) is str and module.partition(".")[0] in _LIBRARIES


@contextlib.contextmanager
def isolating(*roots: Any) -> Iterator[Reach]:
    """Leave modules that `roots` can reach, random streams and torch's switches as they are."""
    reach = Reach((*roots, cached_weights()))
    generators = RandomState([t for t in flatten(roots)[0] if is_tensor(t)])
    streams = [(random.setstate, random.getstate())]
    if (numpy := sys.modules.get("numpy")) is not None:
        streams.append((numpy.random.set_state, numpy.random.get_state()))
    try:
        with switches_put_back():
            yield reach
    finally:
        generators.restore()
        for put_back, state in streams:
            put_back(state)
        reach.restore()


class Reach:
    """What a function can reach, as it is now. No method of the user's is called for it.

    Attributes:
        tensors: those in reach.
        modules: those in reach.
        once: what a look would use up, if it is in reach: an iterator, a parameter without a shape yet.
    """

    def __init__(self, roots: tuple[Any, ...]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.modules: list[torch.nn.Module] = []
        self.once: Any = None
        self._isolated, self._others = Noted(), Noted()
        self._caches: list[tuple[Any, list[Any]]] = []
        self._streams: list[tuple[Callable[[Any, Any], Any], Any, Any]] = []
        self._seen: dict[int, Any] = {}
        self._stack: collections.deque[Any] = collections.deque(roots)  # what is nearest comes first
        while self._stack and len(self._seen) < _MOST:
            value = self._stack.popleft()
            if type(value) in _ATOMS or id(value) in self._seen:
                continue
            # Identities are only good while the objects live.
            self._seen[id(value)] = value
            self._look_at(value)

    def mute(self) -> None:
        """Let hooks on the backward of modules do nothing, until `restore`: what they are given has no data.

        They stay in their tables, as a module that has some runs other ops.
        """
        for module in self.modules:
            held = attributes(module) or {}
            for name in ("_backward_hooks", "_backward_pre_hooks"):
                table = held.get(name) or {}
                for key in table:
                    table[key] = _nothing

    def restore(self) -> None:
        """Put modules, attributes of tensors and random streams back."""
        for put_back, where, before in self._streams:
            put_back(where, before)
        self._isolated.restore_state()

    def without(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        """Let what has come to hold such a tensor hold what it held before."""
        self._others.restore_state(lambda new: _leads_to(new, wanted))
        for cache, before in self._caches:
            old = {*map(id, before)}
            if _leads_to([value for value in _remembered(cache) if id(value) not in old], wanted):
                # Its table is its own. What was in there is computed again when it is asked for.
                cache.cache_clear()

    def _look_at(self, value: Any) -> None:
        # By its type: a proxy would do who knows what if it were asked for its class.
        kind = type(value)
        if issubclass(kind, (dict, list, set, collections.deque)):
            self._container(value)
        elif issubclass(kind, (tuple, frozenset)):
            self._stack += items(value)
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
            self._attributes(value, isolate=True)
        elif issubclass(kind, torch.nn.Module):
            self._module(value)
        elif issubclass(kind, torch.optim.Optimizer):
            self._optimizer(value)
        elif (stream := _stream(value)) is not None:
            self._streams.append(stream)
        elif not issubclass(kind, types.ModuleType):
            self._object(value)

    def _note(self, container: Any, isolate: bool = False) -> None:
        """Note what is in a container, once, and look into it unless it is long."""
        self._seen[id(container)] = container
        (self._isolated if isolate else self._others).note(container)
        if length(container) <= _LONG:
            self._stack += items(container)

    def _container(self, value: Any) -> None:
        if _is_of_the_process(value):
            return
        if length(value) <= 100 * _LONG:
            self._note(value)
        if type(value).__module__ != "builtins":
            self._attributes(value)

    def _module(self, module: torch.nn.Module) -> None:
        self.modules.append(module)
        self._attributes(module, isolate=True)
        held = attributes(module) or {}
        for name in _TABLES & held.keys():
            if is_a(table := held[name], (dict, set)) and id(table) not in self._seen:
                self._note(table, isolate=True)
        self._stack.append(type(module))

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """What it knows of each parameter, and its groups, which a schedule writes to."""
        held = attributes(optimizer) or {}
        state, groups = held.get("state", {}), held.get("param_groups", [])
        for table in (held, state, groups, *dict.values(state), *groups):
            if is_a(table, (dict, list)) and id(table) not in self._seen:
                self._note(table, isolate=True)

    def _attributes(self, value: Any, isolate: bool = False) -> None:
        """The attributes of an object: in its dictionary, and in its slots."""
        # (What a thread has there only it can see.)
        held = getattr(value, "__dict__", None) if is_a(value, threading.local) else attributes(value)
        if held is not None and id(held) not in self._seen:
            self._note(held, isolate)
        self._stack += (self._isolated if isolate else self._others).note_in(value, slots(value))

    def _object(self, value: Any) -> None:
        kind = type(value)
        if not is_library(kind.__module__):
            self._attributes(value)
            self._stack.append(kind)
        elif kind.__module__ in _PLAIN_OBJECTS or kind.__module__.startswith("remat"):
            self._attributes(value)
        elif hasattr(kind, "__next__") and kind.__module__ != "_io":
            self.once = value

    def _class(self, kind: type) -> None:
        if is_library(kind.__module__):
            return
        self._others.note(kind)
        self._stack += [v for k, v in names_of(kind).items() if k == "__call__" or not k.startswith("__")]
        self._stack += kind.__bases__

    def _function(self, fn: types.FunctionType) -> None:
        for cell in fn.__closure__ or ():
            self._stack += self._others.note_in(cell, (CONTENTS,))
        self._stack += [fn.__defaults__, fn.__kwdefaults__, fn.__dict__]
        if not is_library(fn.__globals__.get("__name__")):
            names = list(names_in(fn.__code__))
            spaces, met = [fn.__globals__], {id(fn.__globals__)}
            for space in spaces:
                self._stack += (named := self._others.note_in(space, names))
                # `import state` makes what is in there as near as what is in this file.
                for module in [v for v in named if is_a(v, types.ModuleType)]:
                    if not is_library(module.__name__) and id(vars(module)) not in met:
                        met.add(id(vars(module)))
                        spaces.append(vars(module))

    def _wrapper(self, value: Any) -> None:
        if issubclass(type(value), functools.partial):
            # (A subclass may define its parts anew.)
            self._stack += functools.partial.__reduce__(value)[2]
            return
        if issubclass(type(value), _CACHE):
            self._caches.append((value, found := _remembered(value)))
            self._stack += (*found, *vars(value).values())
        for name in ("__self__", "__func__", "func", "args", "keywords", "fget", "fset", "__wrapped__"):
            if (part := getattr(value, name, None)) is not None:
                self._stack.append(part)


def _nothing(*given: Any) -> None:
    """A hook that changes nothing."""


_WRAPPERS = (types.MethodType, types.BuiltinFunctionType, functools.partial, functools.partialmethod)
_WRAPPERS += (functools.cached_property, property, classmethod, staticmethod, _CACHE)


def _is_of_the_process(held: Any) -> bool:
    """Whether a dict is one of the process's own tables: of modules, or all of what is in a file."""
    if held is sys.modules:
        return True
    name = dict.get(held, "__name__") if issubclass(type(held), dict) else None
    module = sys.modules.get(name) if type(name) is str else None
    return issubclass(type(module), types.ModuleType) and vars(module) is held


def _stream(value: Any) -> tuple[Callable[[Any, Any], Any], Any, Any] | None:
    """How the state of a generator of random numbers is put back; None for what is no generator."""
    kind = type(value)
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
    return None


def _remembered(cache: Any) -> list[Any]:
    """What an `lru_cache` holds: with a bound it shows that, without one its table."""
    shown = gc.get_referents(cache)
    tables = [table for table in shown if type(table) is dict and table is not vars(cache)]
    return [*shown, *[value for table in tables for value in table.values()]]


# What is not looked into: it leads to the whole program. More objects than this are data.
_PROGRAM, _MOST_HELD = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType), 5_000


def _leads_to(values: list[Any], wanted: Callable[[torch.Tensor], bool]) -> bool:
    """Whether one of the values is, or holds, a tensor that is `wanted`, or a node of autograd."""
    stack, seen = list(values), set[int]()
    while stack and len(seen) < _MOST_HELD:
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
            stack += [in_slot(CONTENTS, cell) for cell in value.__closure__ or ()]
            stack += [value.__defaults__, value.__dict__]
        elif kind not in (str, bytes, int, float, bool):
            stack += gc.get_referents(value)
    return False
