"""By what a joint graph is remembered: all that the ops of a call can depend on short of data.

A function counts as its code and what it closes over, so that a lambda written in a loop is one function.
Tensors count as their metadata, plain values as they are, modules as themselves (weakly) with their flags,
numbers and strings, objects as their class and what they hold: one that is made anew in every step is the
same one. What cannot be looked into counts by its identity. A key holds no functions, tensors or modules.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from remat._core import is_library
from remat.plan.joint import all_for_target, target_kind
from remat.transforms import (
    MISSING,
    Identity,
    Key,
    attributes,
    container_of,
    flatten,
    in_slot,
    is_a,
    is_module,
    is_tensor,
    items,
    length,
    lies,
    name_of,
    names_of,
    shape_of,
    slots,
)
from remat.transforms.compat import is_fake

_PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None), type(...)))
_BY_VALUE = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What every module has; of these its mode, tensors, children and hooks are looked at by themselves.
_USUAL = frozenset(torch.nn.Module().__dict__)
# What a region keeps is nothing that its ops depend on.
_SKIPPED = _USUAL | {"_remat_settings"}
# A longer container counts as itself: its contents are data.
_LONG = 256


# So deep, and so many in one look, are objects looked into: what is beyond counts as its class.
_DEEP, _MANY = 4, 64


class Loose(tuple[Hashable, ...]):
    """What a container or an object holds, in a key: it may change in every call, and no op with it."""

    __slots__ = ()


def call_key(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """The key of `fn(*args, **kwargs)` as things are now; None where the call must not be remembered."""
    while is_a(fn, functools.partial):
        # Model libraries make a new one at every call, of the same layer.
        fn, args, kwargs = fn.func, (*fn.args, *args), fn.keywords | kwargs
    found = _found(_Look(), fn, args, kwargs)
    try:
        return None if found is None else Key(*found)
    except TypeError:
        # Symbolic sizes and the like have no hash.
        return None


def alike_key(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """What a call looks like, whichever module of its class it is of; None where nothing can stand for it."""
    return _found(_Look(alike=True), fn, args, kwargs)


def facts_of(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """What of a tensor decides which ops run, and what they take."""
    return shape_of(tensor), lies(tensor), tensor.dtype, tensor.device, tensor.requires_grad


def _found(look: _Look, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    if not kwargs and all(map(is_tensor, args)):
        leaves, spec = args, len(args)
    else:
        leaves, spec = flatten((args, kwargs))
    try:
        look.at(fn)
        look.each(leaves)
        return [*look.found, spec, *modes()]
    except (TypeError, RecursionError):
        return None


def alike(one: list[Any], other: list[Any]) -> bool:
    """Whether two calls look alike but for one number, as the layers of a model are counted."""
    if len(one) != len(other):
        return False
    steps: set[int] = set()
    for a, b in zip(one, other, strict=True):
        if type(a) is int and type(b) is int:
            steps.add(b - a)
        elif type(a) is not type(b) or a != b:
            return False
    return len(steps - {0}) <= 1


def modes() -> tuple[Hashable, ...]:
    """Settings of the process that change which ops a function runs."""
    cast = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    sdp = torch.backends.cuda
    attention = sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled()
    enabled = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    strict = torch.are_deterministic_algorithms_enabled(), all_for_target()
    return enabled, tuple(cast), torch.get_default_dtype(), attention, strict, target_kind()


class _Look:
    """One look at a function and its arguments, written down flat; what is met twice counts as met before."""

    def __init__(self, *, alike: bool = False) -> None:
        self.alike = alike
        self.found: list[Hashable] = []
        self.seen: dict[int, int] = {}
        self.alive: list[Any] = []
        self.depth, self.room = 0, _MANY

    def at(self, value: Any) -> None:
        """Write down what `value` counts as."""
        kind = type(value)
        if kind in _PLAIN:
            # The types tell 1, 1.0 and True apart.
            self.found += (kind, value)
            return
        if issubclass(kind, _BY_VALUE):
            self.found.append(value)
            return
        number = id(value)
        if number in self.seen:
            self.found += ("again", self.seen[number])
            return
        self.seen[number] = len(self.seen)
        if issubclass(kind, torch.Tensor):
            self._tensor(value, kind)
        elif issubclass(kind, torch.nn.Module) and "_parameters" in (held := attributes(value) or {}):
            self._module(value, held)
        elif kind is types.FunctionType:
            self._function(value)
        elif container_of(value) is not None:
            self._loosely(self._container, value)
        else:
            self._object(value)

    def each(self, values: Iterable[Any]) -> None:
        """Write down several things: what most of them are without a further call, as this runs at every
        call of a region."""
        found, seen = self.found, self.seen
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                found += (kind, value)
            elif (kind is torch.Tensor or kind is torch.nn.Parameter) and (number := id(value)) not in seen:
                seen[number] = len(seen)
                found += (kind, *facts_of(value))
                try:
                    found.append(value.is_leaf)
                except RuntimeError:
                    found.append(_STALE)
            else:
                self.at(value)

    def _tensor(self, tensor: torch.Tensor, kind: type) -> None:
        if is_lazy(tensor):
            self.found.append(kind)
            return
        try:
            held = issubclass(kind, torch.nn.Parameter) or tensor.is_leaf
        except RuntimeError:
            held = _STALE
        # As `each` writes them.
        kind = torch.Tensor if is_fake(tensor) and kind is not torch.nn.Parameter else kind
        self.found += (kind, *facts_of(tensor), held)

    def _loosely(self, look: Callable[[Any], None], value: Any) -> None:
        """Write down what something holds as one thing, of which a rough key knows nothing."""
        if self.alike:
            # There one number may differ wherever it is.
            look(value)
            return
        kind, outer = type(value), self.found
        outer.append(name_of(kind) if container_of(value) is kind else Identity(kind))
        if self.depth < _DEEP:
            self.found, self.depth = [], self.depth + 1
            try:
                look(value)
            finally:
                inside, self.found, self.depth = self.found, outer, self.depth - 1
            outer.append(Loose(inside))

    def _container(self, value: Any) -> None:
        base, size = container_of(value), length(value)
        self.found += (name_of(type(value)), size)
        if size > _LONG:
            self.found.append(id(value))
        elif base is set or base is frozenset:
            # In no order that would be the same for an equal one.
            self.found.append(frozenset(map(_of, items(value))))
        else:
            if base is dict:
                self.each(list(dict.keys(value)))
            self.each(items(value))
        if type(value) is not base:
            self._own(value)

    def _function(self, fn: types.FunctionType) -> None:
        code = fn.__code__
        # The last is what `record` is told by those that make functions for it.
        self.found += (Identity(code), fn.__dict__.get("held"))
        self.at(fn.__defaults__)
        self.at(fn.__kwdefaults__)
        for cell in fn.__closure__ or ():
            try:
                self.at(cell.cell_contents)
            except ValueError:
                self.found.append("empty")
        if not (fn.__module__ or "").startswith("torch."):
            self._globals(code, fn.__globals__)

    def _globals(self, code: types.CodeType, names: dict[str, Any]) -> None:
        """What a function reads from its file: flags, models, tensors, other functions (as their code)."""
        for name in code.co_names:
            value = names.get(name, MISSING)
            if value is MISSING or is_a(value, (types.ModuleType, type)):
                continue
            self.found.append(name)
            if is_a(value, types.FunctionType):
                self.found.append(Identity(value.__code__))
            else:
                self.at(value)

    def _module(self, module: torch.nn.Module, held: dict[str, Any]) -> None:
        found = self.found
        parameters, buffers, children = held["_parameters"], held["_buffers"], held["_modules"]
        # Of those inside another one their number will do: what may change of them is looked at.
        if self.alike:
            found.append(Identity(type(module)))
        else:
            found.append(Identity(module) if not found else id(module))
        found += (name_of(type(module)), held.get("training"), *parameters, *buffers, *children)
        hooked = held["_forward_hooks"] or held["_forward_pre_hooks"]
        if hooked or held["_backward_hooks"] or held["_backward_pre_hooks"]:
            for name in _HOOKS:
                # Their numbers are never given twice, so that no two modules have the same.
                found += (name, len(held[name])) if self.alike else (name, *held[name])
        # This runs at every call of a region: what most modules have is read without a further call.
        for name in [n for n in held if n not in _SKIPPED] if len(held) > len(_USUAL) else ():
            if (kind := type(value := held[name])) in _PLAIN:
                found += (name, kind, value)
            else:
                found.append(name)
                self.at(value)
        self.each(parameters.values())
        if buffers:
            self.each(buffers.values())
        seen = self.seen
        for value in children.values() if children else ():
            inner = attributes(value) if is_module(value) else None
            if inner is not None and "_parameters" in inner and id(value) not in seen:
                seen[id(value)] = len(seen)
                self._module(value, inner)
            else:
                self.at(value)

    def _object(self, value: Any) -> None:
        found, kind = self.found, type(value)
        if kind is types.MethodType:
            self.at(value.__func__)
            self.at(value.__self__)
        elif kind is types.BuiltinFunctionType:
            # A method of a built-in object is made anew wherever it is looked up.
            found.append(value.__qualname__)
            if not is_a(value.__self__, (type, types.ModuleType)):
                self.at(value.__self__)
        elif kind is functools.partial:
            for part in (value.func, value.args, value.keywords):
                self.at(part)
        elif issubclass(kind, torch.Generator):
            found += ("generator", value.device)
        elif (parts := names_of(kind).get("made_of")) is not None and name_of(kind).startswith("_"):
            # Identities are only good while the objects live.
            self.alive.append(made := parts(value))
            found.append(name_of(kind))
            self.at(made)
        elif issubclass(kind, (type, types.ModuleType, torch.nn.Module)):
            found.append(Identity(value))
        elif self.room > 0 and _is_users(kind):
            self.room -= 1
            self._loosely(self._own, value)
        else:
            # Two functions are never alike. (What Dynamo has traced is an object of the library's.)
            found += (name_of(kind), Identity(value) if callable(value) else id(value))

    def _own(self, value: Any) -> None:
        """The attributes and slots of an object, in the order in which they were set."""
        for name, held in list(dict.items(attributes(value) or {})):
            self.found.append(name)
            self.at(held)
        for slot in slots(value):
            self.found.append(slot.__name__)
            self.at(in_slot(slot, value))


def _is_users(kind: type) -> bool:
    """Whether objects of a class hold state of the user's that can be read."""
    module = names_of(kind).get("__module__")
    return type(module) is str and not is_library(module)


def _of(value: Any) -> Hashable:
    look = _Look()
    look.at(value)
    return tuple(look.found)


# A view that must not be used any more has no history: FSDP1 leaves such ones in modules between two steps.
_STALE = "stale"
