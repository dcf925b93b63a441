"""Where a function holds its tensors: what a recomputation puts back in modules, and what a call captures.

Captured tensors are found by a walk over cells, defaults, bound objects, modules, containers and the globals
that code names.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from remat.transforms.compat import functions_as_they_are, is_dead, is_wrapped, unwrap_once

# Where the modules under a module hold tensors: the tables, and the keys in them.
Slots = tuple[list[dict[str, Any]], list[str]]
_slots: weakref.WeakKeyDictionary[torch.nn.Module, Slots] = weakref.WeakKeyDictionary()


class Bindings:
    """Which tensors the modules in reach hold, so that a recomputation sees them again.

    `torch.func.functional_call` puts other tensors into a module for the time of one call; the recomputation
    runs after that.
    """

    __slots__ = ("near", "slots")

    # Every tensor in near reach, in an order that is the same for every call of a function: those in the
    # slots of modules, None in free ones, and behind them those outside of modules.
    near: list[torch.Tensor | None]

    def __init__(self, function: Callable[..., Any], slots: Slots | None = None) -> None:
        """What `function` sees now; `slots` are those of a module, if that is what it is."""
        if slots is not None:
            self.slots = slots
            self.near = self._now()
        else:
            found = [slots_of(module) for module in _modules(function)]
            self.slots = [t for tables, _ in found for t in tables], [k for _, keys in found for k in keys]
            self.near = self._now()
            self.near.extend(_loose_tensors(function))

    def _now(self) -> list[torch.Tensor | None]:
        # In C throughout: it happens twice for every region.
        return list(map(dict.get, *self.slots))

    def changed(self) -> list[tuple[dict[str, Any], str, Any]]:
        """The slots that hold another tensor now."""
        if all(map(operator.is_, self._now(), self.near)):
            return []
        # Sharded parameters are swapped by FSDP itself, in both passes.
        return [
            (held, key, tensor)
            for held, key, tensor in zip(*self.slots, self.near, strict=False)
            if held.get(key) is not tensor
            and not hasattr(tensor, "placements")
            and not hasattr(held.get(key), "placements")
        ]

    def put_back(self) -> None:
        """Let the modules hold what they held."""
        for held, key, tensor in self.changed():
            held[key] = tensor

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        before = [(held, key, held.get(key)) for held, key, _ in self.changed()]
        self.put_back()
        try:
            yield
        finally:
            for held, key, tensor in before:
                held[key] = tensor


def slots_of(module: torch.nn.Module) -> Slots:
    """Where `module` and those in it hold tensors."""
    slots = _slots.get(module)
    if slots is None:
        tables: list[dict[str, Any]] = [
            t for part in module.modules() for t in (part._parameters, part._buffers)
        ]
        slots = [t for t in tables for _ in t], [key for t in tables for key in t]
        _slots[module] = slots
    return slots


def _loose_tensors(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Tensors that a callable holds outside of modules: in cells, in what a partial binds, in containers."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.FunctionType):
        parts = cells(value)
    elif type(value) in (list, tuple):
        parts = value
    elif type(value) is dict:
        parts = value.values()
    if depth:
        for part in parts:
            yield from _loose_tensors(part, depth - 1)


def cells(function: types.FunctionType) -> Iterator[Any]:
    """What a function closes over; cells that hold nothing yet are left out."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def _modules(function: Any) -> Iterator[torch.nn.Module]:
    """Modules in the near reach of a callable: itself, its self, its cells, what a partial binds."""
    if isinstance(function, torch.nn.Module):
        yield function
    elif isinstance(function, types.MethodType):
        yield from _modules(function.__self__)
    elif isinstance(function, functools.partial):
        for value in (function.func, *function.args, *function.keywords.values()):
            yield from _modules(value)
    elif isinstance(function, types.FunctionType):
        for held in cells(function):
            if isinstance(held, (torch.nn.Module, functools.partial, types.MethodType)):
                yield from _modules(held)


# -- what a function captures ----------------------------------------------------------------------------

_ATOMS = (str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.dtype, torch.device)

_MOST = 100_000


def differentiable(tensor: torch.Tensor) -> bool:
    """Whether a derivative or a batch dimension could be lost if `tensor` were taken for a constant."""
    return is_wrapped(tensor) or tensor.requires_grad


def captured(function: Callable[..., Any]) -> list[torch.Tensor]:
    """The tensors reachable from `function` that could carry a derivative or a batch dimension."""
    # A substitution in force would answer for its operands, where what is asked about is the captured tensor.
    with functions_as_they_are():
        return _captured(function)


def _captured(function: Callable[..., Any]) -> list[torch.Tensor]:
    return [t for t in in_reach(function) if isinstance(t, torch.Tensor) and differentiable(t)]


def in_reach(*roots: Any) -> Iterator[Any]:
    """Everything that functions, modules and containers lead to, once each; nothing inside tensors."""
    seen: dict[int, Any] = {}
    stack = list(roots)
    while stack and len(seen) < _MOST:
        value = stack.pop()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        # Identities are only good while the objects live.
        seen[id(value)] = value
        yield value
        if not isinstance(value, torch.Tensor):
            stack.extend(_inside(value))


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, types.FunctionType):
        yield from _inside_function(value)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif isinstance(value, torch.nn.Module):
        yield from _inside_module(value)
    else:
        yield from getattr(value, "__dict__", {}).values()
        for kind in type(value).__mro__:
            for slot in getattr(kind, "__slots__", ()):
                if isinstance(slot, str) and hasattr(value, slot):
                    yield getattr(value, slot)


def _inside_module(module: torch.nn.Module) -> Iterator[Any]:
    for part in module.modules():
        yield from part._parameters.values()
        yield from part._buffers.values()
        # Tensors and callables that hang on a module as plain attributes.
        yield from (v for k, v in part.__dict__.items() if not k.startswith("_"))


def _inside_function(function: types.FunctionType) -> Iterator[Any]:
    yield from cells(function)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from function.__dict__.values()
    yield from _named_globals(function.__code__, function.__globals__)


def _named_globals(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    for name in code.co_names:
        value = names.get(name)
        # Library functions are not walked: what they close over is not the user's.
        if not isinstance(value, types.FunctionType) or value.__globals__ is names:
            yield value
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named_globals(constant, names)


def without_dead(tensor: torch.Tensor) -> torch.Tensor:
    """What a cache holds, without the wrappers of levels that are gone: torch takes one off, and no more."""
    while is_wrapped(tensor) and is_dead(tensor):
        tensor = unwrap_once(tensor)
    return tensor


# -- a function that captures what it is also given ----------------------------------------------------------
#
# Both are one object for it, in every run. A run below levels, or a recomputation, hands over other tensors
# than the user did. Then `argument is captured` would answer otherwise, and autograd would save two tensors
# in the place of one.

_DEPTH = 4
Moved = list[tuple[types.CellType, types.CellType, Any]]


@contextlib.contextmanager
def standing_in(function: Callable[..., Any], given: Mapping[int, torch.Tensor]) -> Iterator[Any]:
    """`function`, with other tensors in the place of those that it captures; `given`: those by old ids.

    Cells are replaced in copies of functions, since other threads may call the functions. What the copies
    assign to such a variable is assigned to the variable in the end.
    """
    moved: Moved = []
    yield _again(function, given, moved, _DEPTH) if given else function
    for old, new, value in moved:
        if new.cell_contents is not value:
            old.cell_contents = new.cell_contents


def _again(value: Any, given: Mapping[int, torch.Tensor], moved: Moved, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return given.get(id(value), value)
    if not depth:
        return value
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        made = [_again(part, given, moved, depth - 1) for part in parts]
        if all(one is other for one, other in zip(made, parts, strict=True)):
            return value
        count = 1 + len(value.args)
        return functools.partial(*made[:count], **dict(zip(value.keywords, made[count:], strict=True)))
    return _copy(value, given, moved, depth) if _is_users(value) else value


def _copy(function: Any, given: Mapping[int, torch.Tensor], moved: Moved, depth: int) -> Any:
    cells = [_cell(cell, given, moved, depth) for cell in function.__closure__ or ()]
    defaults = tuple([_again(value, given, moved, 0) for value in function.__defaults__ or ()])
    same = all(one is other for one, other in zip(cells, function.__closure__ or (), strict=True))
    if same and all(one is other for one, other in zip(defaults, function.__defaults__ or (), strict=True)):
        return function
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults, tuple(cells)
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _cell(cell: types.CellType, given: Mapping[int, torch.Tensor], moved: Moved, depth: int) -> Any:
    try:
        held = cell.cell_contents
    except ValueError:
        return cell  # nothing is in it yet
    value = _again(held, given, moved, depth - 1)
    if value is held:
        return cell
    made = types.CellType(value)
    moved.append((cell, made, value))
    return made


def _is_users(value: Any) -> bool:
    """Whether it is a function of the user's. Wrappers of this library find their function otherwise."""
    made_by = getattr(value, "__module__", None) or ""
    return isinstance(value, types.FunctionType) and not made_by.startswith(("remat.", "torch."))
