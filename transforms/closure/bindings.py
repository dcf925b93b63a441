"""Where a function holds its tensors: what a recomputation puts back in modules, and what a call captures.

Captured tensors are found by a walk over cells, defaults, bound objects, modules, containers and the globals
that code names.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from remat.transforms.compat import (
    below_levels,
    dual_level_open,
    functions_as_they_are,
    has_tangent,
    is_dead,
    is_wrapped,
    unwrap_once,
)
from remat.transforms.context import quiet

# Where modules hold tensors: the tables, and the keys in them.
Slots = tuple[list[dict[str, Any]], list[str]]


class Bindings:
    """Which tensors the modules in reach of functions hold, so that a recomputation sees them again.

    `torch.func.functional_call` puts other tensors into a module for the time of one call; the recomputation
    runs after that. So it does after a function has put its next state where it found the last one
    (`self.hidden = hidden.detach()`).
    """

    __slots__ = ("near", "others", "slots")

    def __init__(self, reach: Iterable[Any], states: bool = False) -> None:
        """What modules hold now; `reach`: what functions lead to (`reached`).

        `states`: look into attributes, containers and variables as well.
        """
        reach = list(reach)
        self.slots = slots_of(*(value for value in reach if isinstance(value, torch.nn.Module)))
        self.others: tuple[list[Any], list[Any]] = [], []
        if states:
            self._add(reach)
        self.near = self._now()

    def _add(self, reach: list[Any]) -> None:
        """Places that a tensor is in now: others are caches, which a recomputation finds filled."""
        for table in _tables(reach):
            keys = [key for key, value in table.items() if isinstance(value, torch.Tensor)]
            self.slots[0].extend([table] * len(keys))
            self.slots[1].extend(keys)
        for holder, key, value in _places(reach):
            if isinstance(value, torch.Tensor):
                self.others[0].append(holder)
                self.others[1].append(key)

    def _now(self) -> list[torch.Tensor | None]:
        # In C but for attributes and variables: it happens twice for every region.
        return [*map(dict.get, *self.slots), *map(_held, *self.others)]

    def changed(self) -> list[tuple[Any, Any, Any]]:
        """The slots that hold another tensor now."""
        if all(map(operator.is_, now := self._now(), self.near)):
            return []
        # Sharded parameters are swapped by FSDP itself, in both passes.
        holders, keys = [*self.slots[0], *self.others[0]], [*self.slots[1], *self.others[1]]
        return [
            (held, key, tensor)
            for held, key, tensor, other in zip(holders, keys, self.near, now, strict=True)
            if other is not tensor and not hasattr(tensor, "placements") and not hasattr(other, "placements")
        ]

    def put_back(self) -> None:
        """Let the modules hold what they held."""
        for held, key, tensor in self.changed():
            _hold(held, key, tensor)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        before = [(held, key, _held(held, key)) for held, key, _ in self.changed()]
        self.put_back()
        try:
            yield
        finally:
            for held, key, tensor in before:
                _hold(held, key, tensor)


def _held(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key)
    if isinstance(holder, list):
        return holder[key] if key < len(holder) else None
    try:
        return getattr(holder, key)
    except (AttributeError, ValueError):  # a variable that was deleted
        return None


def _hold(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict):
        holder[key] = value
    elif not isinstance(holder, list):
        setattr(holder, key, value)
    elif key < len(holder):
        holder[key] = value


def _tables(reach: list[Any]) -> Iterator[dict[Any, Any]]:
    """Dictionaries that functions lead to, and those in which objects have their attributes."""
    for value in reach:
        if isinstance(value, torch.nn.Module):
            yield from (part.__dict__ for part in value.modules())
        elif isinstance(value, dict):
            yield value
        elif isinstance(table := getattr(value, "__dict__", None), dict):
            if not isinstance(value, (types.FunctionType, torch.Tensor)):
                yield table


def _places(reach: list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Where else a tensor can be put: items of lists, variables, slots."""
    for value in reach:
        if isinstance(value, list):
            yield from ((value, i, item) for i, item in enumerate(value))
        elif isinstance(value, types.FunctionType):
            yield from (
                (cell, "cell_contents", _held(cell, "cell_contents")) for cell in value.__closure__ or ()
            )
            names = value.__globals__
            yield from ((names, name, names.get(name)) for name in value.__code__.co_names)
        elif not isinstance(value, torch.Tensor):
            slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
            yield from ((value, slot, _held(value, slot)) for slot in slots if isinstance(slot, str))


def slots_of(*modules: torch.nn.Module) -> Slots:
    """Where modules and those in them hold tensors."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    tables: list[dict[str, Any]] = [t for part in parts for t in (part._parameters, part._buffers)]
    return [t for t in tables for _ in t], [key for t in tables for key in t]


def cells(function: types.FunctionType) -> Iterator[Any]:
    """What a function closes over; cells that hold nothing yet are left out."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


# -- what a function captures ----------------------------------------------------------------------------

_ATOMS = (str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.dtype, torch.device)

_MOST = 100_000


def differentiable(tensor: torch.Tensor) -> bool:
    """Whether a derivative or a batch dimension could be lost if `tensor` were taken for a constant."""
    if is_wrapped(tensor) or tensor.requires_grad:
        return True
    # A plain `dual_level`, as `torch.func.linearize` opens one, wraps nothing.
    if dual_level_open():
        # (An error of torch's: below autograd nobody pushes tangents.)
        with contextlib.suppress(RuntimeError), below_levels():
            return quiet(has_tangent, tensor)
    return False


def reached(*roots: Any) -> list[Any]:
    """Everything that functions lead to."""
    # A substitution in force would answer for its operands, where what is asked about is the captured tensor.
    with functions_as_they_are():
        return list(in_reach(*roots))


def captured(reach: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among what functions lead to that could carry a derivative or a batch dimension."""
    with functions_as_they_are():
        return [value for value in reach if isinstance(value, torch.Tensor) and differentiable(value)]


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
        # Tensors and callables that hang on a module as plain attributes; of private ones tensors alone.
        yield from (
            v for k, v in part.__dict__.items() if not k.startswith("_") or isinstance(v, torch.Tensor)
        )


def _inside_function(function: types.FunctionType) -> Iterator[Any]:
    yield from cells(function)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from function.__dict__.values()
    yield from _named_globals(function.__code__, function.__globals__)


def _named_globals(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    for name in code.co_names:
        value = names.get(name)
        # Library functions are not walked: what they close over is not the user's. Regions' functions are.
        if not isinstance(value, types.FunctionType) or value.__globals__ is names or _is_region(value):
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


def _is_region(function: types.FunctionType) -> bool:
    return hasattr(function, "__wrapped__") and function.__globals__.get("__name__", "").startswith("remat.")
