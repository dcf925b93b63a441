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
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from remat._core.holders import (
    CACHE,
    Attributes,
    Cached,
    Cells,
    FileNames,
    Holding,
    Items,
    Slots,
    container,
    leads_to,
    names_in,
)
from remat.transforms import flatten, is_tensor
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


def _is_library(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


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
        self._isolated: list[Holding] = []
        self._others: list[Holding] = []
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
            held = object.__getattribute__(module, "__dict__")
            for table in (held.get("_backward_hooks"), held.get("_backward_pre_hooks")):
                for key in table or ():
                    table[key] = _nothing

    def restore(self) -> None:
        """Put modules, attributes of tensors and random streams back."""
        for put_back, where, before in self._streams:
            put_back(where, before)
        for holder in reversed(self._isolated):
            holder.restore()

    def without(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        """Let what has come to hold such a tensor hold what it held before."""
        for holder in reversed(self._others):
            if (new := holder.new()) and leads_to(new, wanted):
                holder.restore()

    def _look_at(self, value: Any) -> None:
        # By its type: a proxy would do who knows what if it were asked for its class.
        kind = type(value)
        if issubclass(kind, (dict, list, set, collections.deque)):
            self._container(value)
        elif issubclass(kind, tuple):
            self._stack += tuple.__iter__(value)
        elif issubclass(kind, frozenset):
            self._stack += frozenset.__iter__(value)
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

    def _note(self, holder: Holding, look: bool = True, isolate: bool = False) -> None:
        (self._isolated if isolate else self._others).append(holder)
        if look:
            self._stack += holder.values()

    def _container(self, value: Any) -> None:
        if _is_of_the_process(value):
            return
        holder = container(value)
        if len(holder.before) <= 100 * _LONG:
            self._note(holder, len(holder.before) <= _LONG)
        if type(value).__module__ != "builtins":
            self._attributes(value)

    def _module(self, module: torch.nn.Module) -> None:
        self.modules.append(module)
        self._attributes(module, isolate=True)
        held = object.__getattribute__(module, "__dict__")
        for name in _TABLES & held.keys():
            table = held[name]
            if issubclass(type(table), (dict, set)) and id(table) not in self._seen:
                self._seen[id(table)] = table
                self._note(container(table), isolate=True)
        self._stack.append(type(module))

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """What it knows of each parameter, and its groups, which a schedule writes to."""
        held = object.__getattribute__(optimizer, "__dict__")
        state, groups = held.get("state", {}), held.get("param_groups", [])
        for table in (held, state, groups, *dict.values(state), *groups):
            if isinstance(table, (dict, list)) and id(table) not in self._seen:
                self._seen[id(table)] = table
                self._note(container(table), isolate=True)

    def _attributes(self, value: Any, isolate: bool = False) -> None:
        """The attributes of an object: in its dictionary, and in its slots."""
        with contextlib.suppress(AttributeError):
            # (What a thread has there only it can see.)
            local = issubclass(type(value), threading.local)
            held = value.__dict__ if local else object.__getattribute__(value, "__dict__")
            if type(held) is dict and id(held) not in self._seen:
                self._seen[id(held)] = held
                self._note(Items(held), isolate=isolate)
        if members := _slots(type(value)):
            self._note(Slots((members, value)), isolate=isolate)

    def _object(self, value: Any) -> None:
        kind = type(value)
        if not _is_library(kind.__module__):
            self._attributes(value)
            self._stack.append(kind)
        elif kind.__module__ in _PLAIN_OBJECTS or kind.__module__.startswith("remat"):
            self._attributes(value)
        elif hasattr(kind, "__next__") and kind.__module__ != "_io":
            self.once = value

    def _class(self, kind: type) -> None:
        if _is_library(kind.__module__):
            return
        self._note(Attributes(kind))
        self._stack += [vars(kind).get("__call__"), *kind.__bases__]

    def _function(self, fn: types.FunctionType) -> None:
        if fn.__closure__:
            self._note(Cells(fn.__closure__))
        self._stack += [fn.__defaults__, fn.__kwdefaults__, fn.__dict__]
        if not _is_library(fn.__globals__.get("__name__")):
            names = list(names_in(fn.__code__))
            spaces, met = [fn.__globals__], {id(fn.__globals__)}
            for space in spaces:
                named = FileNames((space, names))
                self._note(named)
                # `import state` makes what is in there as near as what is in this file.
                for module in [v for v in named.values() if issubclass(type(v), types.ModuleType)]:
                    if not _is_library(module.__name__) and id(vars(module)) not in met:
                        met.add(id(vars(module)))
                        spaces.append(vars(module))

    def _wrapper(self, value: Any) -> None:
        if issubclass(type(value), functools.partial):
            # (A subclass may define these anew.)
            self._stack += [vars(functools.partial)[name].__get__(value) for name in _PARTIAL]
            return
        if issubclass(type(value), CACHE):
            self._note(Cached(value))
            self._stack += vars(value).values()
        for name in ("__self__", "__func__", "func", "args", "keywords", "fget", "fset", "__wrapped__"):
            if (part := getattr(value, name, None)) is not None:
                self._stack.append(part)


def _nothing(*given: Any) -> None:
    """A hook that changes nothing."""


_PARTIAL = ("func", "args", "keywords")
_WRAPPERS = (types.MethodType, types.BuiltinFunctionType, functools.partial, functools.partialmethod)
_WRAPPERS += (functools.cached_property, property, classmethod, staticmethod, CACHE)


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


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[Any, ...]:
    members = [m for base in kind.__mro__ if not _is_library(base.__module__) for m in vars(base).values()]
    return tuple([m for m in members if isinstance(m, types.MemberDescriptorType)])
