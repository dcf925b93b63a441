"""Where a function holds its tensors: what a recomputation puts back in modules, and what a call captures.

Captured tensors are found by a walk over cells, defaults, objects, modules, containers and named globals.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from remat.transforms.compat import (
    below_levels,
    dual_level_open,
    functions_as_they_are,
    has_tangent,
    is_stale,
    is_wrapped,
    scripted_now,
    scripted_places,
    set_scripted,
)
from remat.transforms.context import untracked
from remat.transforms.objects import (
    MISSING,
    attributes,
    container_of,
    held,
    in_slot,
    is_a,
    is_module,
    is_tensor,
    items,
    length,
    modules_in,
    names_of,
    slots,
    tables_of,
)

_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
# Where modules hold tensors: the tables, and the keys in them.
Slots = tuple[list[dict[str, Any]], list[str]]


class Bindings:
    """Which tensors the modules in reach of functions hold, so that a recomputation sees them again.

    `torch.func.functional_call` puts other tensors into a module for the time of one call; the recomputation
    runs after that. So it does after a function has put its next state where it found the last one
    (`self.hidden = hidden.detach()`).
    """

    __slots__ = ("near", "others", "scripts", "slots")

    def __init__(self, reach: Iterable[Any], states: bool = False, bound: bool = False) -> None:
        """What modules hold now; `reach`: what functions lead to (`reached`).

        `states`: look into attributes, containers and variables as well. `bound`: note what else variables
        and attributes are bound to: a loop's variable, a flag.
        """
        reach = list(reach)
        parts = parts_of(reach)
        self.slots = slots_of(parts)
        # What modules of TorchScript hold now: `functional_call` puts other tensors there for the time of one
        # call. None where there is no such module; a frozen one holds nothing.
        scripts = [scripted(part) for part in parts if is_a(part, torch.jit.ScriptModule)]
        places_of = {(id(place[0]), place[1]): place for found in scripts for place in found}
        self.scripts = list(places_of.values()) if scripts else None
        self.others: tuple[list[Any], list[Any]] = [], []
        # Places that a tensor is in now: others are caches, which a recomputation finds filled.
        found = [(at, _of_tensors(keys, now)) for at, keys, now in places(reach, parts)] if states else []
        for holder, keys in variables(reach, parts) if bound else ():
            found.append((holder, [key for key in keys if not is_a(_held(holder, key), _NOT_BOUND)]))
        for holder, keys in found:
            holders, names = self.slots if is_a(holder, dict) else self.others
            holders += [holder] * len(keys)
            names += keys
        self.near = self._now()

    def _where(self) -> Iterator[tuple[Any, Any]]:
        return itertools.chain(zip(*self.slots, strict=True), zip(*self.others, strict=True))

    def _now(self) -> list[torch.Tensor | None]:
        # In C but for lists, variables and slots: it happens twice for every region.
        return [*map(dict.get, *self.slots), *map(_held, *self.others)]

    def changed(self) -> list[tuple[Any, Any, Any]]:
        """The slots that hold another tensor now."""
        if all(map(operator.is_, now := self._now(), self.near)):
            return []
        # Sharded parameters are swapped by FSDP itself, in both passes.
        return [
            (*place, tensor)
            for place, tensor, other in zip(self._where(), self.near, now, strict=True)
            if other is not tensor and not _is_sharded(tensor) and not _is_sharded(other)
        ]

    def restore_state(self) -> None:
        """Let the modules hold what they held."""
        hold(self.changed())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        changed = self.changed()
        before = [(holder, key, _held(holder, key)) for holder, key, _ in changed]
        hold(changed)
        try:
            yield
        finally:
            hold(before)

    @contextlib.contextmanager
    def replaced(self, by: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Within, each place holds `by(tensor)` where it held a tensor."""
        near = [(*place, t) for place, t in zip(self._where(), self.near, strict=True) if t is not None]
        others = [(holder, key, by(tensor)) for holder, key, tensor in near]
        try:
            hold(others)
            yield
        finally:
            hold(near)

    @contextlib.contextmanager
    def in_scripts(self, given: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Within, modules of TorchScript hold what they held, or other tensors in the place of that.

        Args:
            given: those, by the ids of what was held.

        The code reads them past every torch function. It is not optimized meanwhile: what torch makes of it
        is differentiated by rules that know neither forward mode nor `vmap` nor a second derivative.
        """
        held = self.scripts or ()
        before = [(module, name, scripted_now(module, name)) for module, name, _ in held]
        try:
            for module, name, tensor in held:
                set_scripted((module, name), given.get(id(tensor), tensor))
            with torch.jit.optimized_execution(False):  # pyright: ignore[reportPrivateImportUsage]
                yield
        finally:
            for module, name, tensor in before:
                set_scripted((module, name), tensor)


def _of_tensors(keys: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    # In C: a long list is passed at every call.
    return [*itertools.compress(keys, map(issubclass, map(type, values), itertools.repeat(torch.Tensor)))]


class Noted:
    """What was held where, to be put back: by containers and classes, and in single places of others.

    Put back one by one: other threads may be looking.
    """

    def __init__(self) -> None:
        self.whole: list[tuple[Any, list[Any]]] = []
        self.single: list[tuple[Any, Any, Any]] = []

    def note(self, value: Any) -> None:
        """Note all that a container holds, or what was given to a class."""
        self.whole.append((value, _filling(value)))

    def note_in(self, holder: Any, keys: Iterable[Any]) -> list[Any]:
        """Note what is in places of an object, and return it. Names, slots, `CONTENTS` of a cell."""
        found = [(holder, key, _held(holder, key, MISSING)) for key in keys]
        self.single += found
        return [value for *_, value in found if value is not MISSING]

    def restore_state(self, where: Callable[[list[Any]], bool] | None = None) -> None:
        """Let all hold that again, or what has come to hold values `where` that is true of them."""
        for value, before in self.whole:
            if len(now := _filling(value)) == len(before) and all(map(operator.is_, now, before)):
                continue
            ours = {*map(id, before)}
            if where is None or where([one for one in now if id(one) not in ours]):
                _refill(value, now, before)
        changed = [place for place in self.single if _held(*place[:2], MISSING) is not place[2]]
        hold([place for place in changed if where is None or where([_held(*place[:2])])])


class PythonState(Noted):
    """All that objects in reach hold, so that a second run of a function leaves nothing there: caches that
    the caller has emptied stay empty, and lists grow once.

    Attributes, modules' tables, items of dicts, lists, sets and deques, variables. What threads share
    (queues, events, loggers) is theirs, too; where parameters are `sharded`, those are of who gathers them.
    """

    def __init__(self, reach: Iterable[Any], sharded: bool = False) -> None:
        super().__init__()
        reach = [value for value in reach if not is_tensor(value)]
        shared = [v for v in reach if type(v).__module__.split(".")[0] in _OF_THREADS]
        apart = {id(part) for value in shared for part in (value, *held(value))}
        reach = [value for value in reach if id(value) not in apart]
        parts = parts_of(reach)
        tables = [t for part in parts for t in tables_of(part)[sharded:]] + [
            attributes(v) for v in (*parts, *reach)
        ]
        found = [*tables, *[v for v in reach if container_of(v) in (dict, list, set, deque)]]
        for value in found:
            if value is not None:
                self.note(value)
        for holder, keys in variables(reach, parts):
            self.note_in(holder, keys)


_OF_THREADS = ("threading", "queue", "_queue", "asyncio", "concurrent", "multiprocessing", "logging")


def _filling(value: Any) -> list[Any]:
    # (Keys and items in turn: a dict of them would ask the keys for their hashes.)
    if is_a(value, type):
        return [one for pair in names_of(value).items() if not pair[0].startswith("__") for one in pair]
    return [*itertools.chain(*_dict(value).items(value))] if container_of(value) is dict else items(value)


def _refill(value: Any, now: list[Any], before: list[Any]) -> None:
    base: Any = container_of(value)
    if base is not None and base is not dict:
        base.clear(value)
        (base.update if base is set else base.extend)(value, before)
        return
    pairs = list(zip(before[::2], before[1::2], strict=True))
    ours = {id(key) for key, _ in pairs}
    hold([(value, key, MISSING) for key in now[::2] if id(key) not in ours])
    hold([(value, key, was) for key, was in pairs if _held(value, key, MISSING) is not was])
    if base is dict and not all(map(operator.is_, _filling(value), before)):  # in another order
        hold([place for key, was in pairs for place in ((value, key, MISSING), (value, key, was))])


def _dict(value: Any) -> Any:
    """Whose methods read and write a dict."""
    return OrderedDict if is_a(value, OrderedDict) else dict


def _is_sharded(value: Any) -> bool:
    return is_tensor(value) and hasattr(value, "placements")


def _held(holder: Any, key: Any, absent: Any = None) -> Any:
    kind = type(holder)
    if type(key) in _DESCRIPTORS:
        found = in_slot(key, holder)
        return absent if found is MISSING else found  # of a variable that was deleted there is nothing
    if issubclass(kind, dict):
        return dict.get(holder, key, absent)
    if issubclass(kind, (list, deque)):
        base: Any = container_of(holder)
        return base.__getitem__(holder, key) if key < length(holder) else None
    if issubclass(kind, type):
        return names_of(holder).get(key, absent)
    return _PARTS[1](holder)  # a partial's arguments


def hold(given: Iterable[tuple[Any, Any, Any]]) -> None:
    """Put values where holders have their keys; none are left where that is MISSING."""
    for holder, key, value in given:
        kind, put = type(holder), value is not MISSING
        if type(key) in _DESCRIPTORS:
            key.__set__(holder, value) if put else key.__delete__(holder)
        elif issubclass(kind, dict):
            base: Any = _dict(holder)
            base.__setitem__(holder, key, value) if put else base.pop(holder, key, None)
        elif issubclass(kind, type):
            type.__setattr__(holder, key, value) if put else type.__delattr__(holder, key)
        elif issubclass(kind, functools.partial):
            now: Any = functools.partial.__reduce__(holder)[2]
            _PARTIAL["__setstate__"](holder, (now[0], value, *now[2:]))
        elif key < length(holder):
            base = container_of(holder)
            base.__setitem__(holder, key, value)


def places(reach: list[Any], parts: Iterable[torch.nn.Module]) -> Iterator[tuple[Any, Any, Iterable[Any]]]:
    """Where a function can put a tensor: a holder, its keys, and what is there now.

    Attributes, slots, items of dictionaries and lists, variables; what code names of files, classes, modules.
    """
    others = [value for value in reach if not is_a(value, (torch.Tensor, torch.nn.Module))]
    found: list[Any] = [*parts, *others]
    for value in found:
        base = container_of(value)
        if base is dict:
            yield value, list(dict.keys(value)), items(value)
        elif base is list or base is deque:
            yield value, range(length(value)), items(value)
        if type(value) is not base and (table := attributes(value)) is not None:
            yield table, list(dict.keys(table)), list(dict.values(table))
        if is_a(value, types.FunctionType):
            yield from _places_named(value)
        elif is_a(value, functools.partial):
            _, args, keywords = [part(value) for part in _PARTS]
            yield value, ("args",), (args,)
            yield keywords, list(dict.keys(keywords)), items(keywords)
        if own := slots(value):
            yield value, own, [_held(value, slot) for slot in own]


# Those of a partial, whatever a subclass says.
_PARTIAL: Any = vars(functools.partial)
_PARTS = [_PARTIAL[name].__get__ for name in ("func", "args", "keywords")]
CONTENTS = vars(types.CellType)["cell_contents"]


def variables(reach: Iterable[Any], parts: Iterable[torch.nn.Module]) -> Iterator[tuple[Any, Iterable[Any]]]:
    """Where variables and attributes of the user's are bound: a holder, and its keys. Items of containers are
    no variables."""
    for part in parts:
        table = attributes(part) or {}
        yield table, [key for key in table if key not in _MODULES_OWN or key == "training"]
        yield (children := tables_of(part)[2]), list(children)
        yield part, slots(part)
    for value in reach:
        if type(value) is types.FunctionType:
            for cell in value.__closure__ or ():
                yield cell, (CONTENTS,)
            known = value.__globals__
            if known.get("__name__", "").split(".")[0] not in _LIBRARIES:
                yield from _named(known, [*names_in(value.__code__)])
        elif not is_a(value, _NO_CONTAINERS):
            if container_of(value) is None and (table := attributes(value)) is not None:
                yield table, list(dict.keys(table))
            yield value, slots(value)


def _named(known: dict[str, Any], names: list[str]) -> Iterator[tuple[Any, list[str]]]:
    yield known, names
    values: list[Any] = [known.get(name) for name in names]
    for value in values:
        if type(value) is types.ModuleType and value.__name__.split(".")[0] not in _LIBRARIES:
            yield vars(value), names
        elif is_a(value, type):
            # (What a class makes of a function or a property is another object at every look.)
            kind: Any = value
            own = names_of(kind)
            yield value, [n for n in names if not hasattr(type(own.get(n)), "__get__")]


def _places_named(function: types.FunctionType) -> Iterator[tuple[Any, Any, Iterable[Any]]]:
    for cell in function.__closure__ or ():
        yield cell, (CONTENTS,), (_held(cell, CONTENTS),)
    names = [*names_in(function.__code__)]
    known = function.__globals__
    yield known, names, map(known.get, names)
    found: list[Any] = [*cells(function), *map(known.get, names)]
    for value in found:
        if is_a(value, type):
            yield value, names, map(names_of(value).get, names)
        elif is_a(value, types.ModuleType) and (table := attributes(value)) is not None:
            yield table, names, [dict.get(table, name) for name in names]


def parts_of(values: Iterable[Any]) -> list[torch.nn.Module]:
    """Modules among these and those in them, once each."""
    return modules_in(*filter(is_module, values))


def slots_of(parts: Iterable[torch.nn.Module]) -> Slots:
    """Where modules hold tensors, those in them left out."""
    tables = [table for part in parts for table in tables_of(part)[:2]]
    return [t for t in tables for _ in t], [key for t in tables for key in t]


def cells(function: types.FunctionType) -> Iterator[Any]:
    """What a function closes over; cells that hold nothing yet are left out."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


# -- what a function captures ----------------------------------------------------------------------------

_ATOMS = (str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.dtype, torch.device)
_NO_CONTAINERS = (*_ATOMS, torch.Tensor, torch.nn.Module)
# What is noted elsewhere; and caches that are empty yet, which a recomputation finds filled.
_NOT_BOUND = (torch.Tensor, type(None))
_LIBRARIES = ("torch", "remat")  # whose own variables are no user's
# What FSDP2's hooks have found out is theirs: they gather in one of the passes only.
_OF_HOOKS = "torch.distributed._composable", "torch.distributed.fsdp"

_MOST, _FEW = 100_000, 100
_WALKED = (torch.Tensor, torch.Generator, list, tuple, dict, deque)
# Attributes that every module has.
_MODULES_OWN = frozenset(vars(torch.nn.Module()))


def differentiable(tensor: torch.Tensor) -> bool:
    """Whether a derivative or a batch dimension could be lost if `tensor` were taken for a constant."""
    if is_wrapped(tensor) or tensor.requires_grad:
        return True
    # A plain `dual_level`, as `torch.func.linearize` opens one, wraps nothing.
    if dual_level_open():
        with below_levels():
            return untracked(has_tangent, tensor)
    return False


def reached(*roots: Any) -> list[Any]:
    """Everything that functions lead to."""
    # A substitution in force would answer for its operands, where what is asked about is the captured tensor.
    with functions_as_they_are():
        return list(in_reach(*roots))


def captured(reach: Iterable[Any], unsaved: bool = False) -> list[torch.Tensor]:
    """The tensors among what functions lead to that could carry a derivative or a batch dimension.

    `unsaved`: also those made in inference mode, which plain autograd refuses to save, and a level saves.
    """
    with functions_as_they_are():
        tensors = [value for value in reach if is_tensor(value)]
        found = [t for t in tensors if differentiable(t) or (unsaved and t.is_inference())]
        return [t for t in found if t.is_leaf and not is_wrapped(t) or not is_stale(t)]


def in_reach(*roots: Any) -> Iterator[Any]:
    """Everything that functions, modules and containers lead to, once each; nothing inside tensors."""
    seen: dict[int, Any] = {}
    stack = list(roots)
    while stack and len(seen) < _MOST:
        value = stack.pop()
        if is_a(value, _ATOMS) or id(value) in seen:
            continue
        # Identities are only good while the objects live.
        seen[id(value)] = value
        yield value
        if not is_tensor(value):
            stack.extend(_inside(value))


def _inside(value: Any) -> Iterable[Any]:
    kind = type(value)
    if kind is types.FunctionType:
        # (A region around the user's function is the library's: what it has learnt is no state of theirs.)
        return (value.__wrapped__,) if _is_region(value) else _inside_function(value)
    if kind is types.MethodType:
        return value.__self__, value.__func__
    if issubclass(kind, torch.nn.Module):
        return _inside_module(value)
    if type(made_in := names_of(kind).get("__module__")) is str and made_in.startswith(_OF_HOOKS):
        return ()
    if issubclass(kind, functools.partial):
        func, args, keywords = [part(value) for part in _PARTS]
        return func, *items(args), *items(keywords), *held(value)
    return held(value)


def _inside_module(module: torch.nn.Module) -> Iterator[Any]:
    for part in modules_in(module):
        parameters, buffers, _ = tables_of(part)
        yield from items(parameters)
        yield from items(buffers)
        # What hangs on a module as a plain attribute; of private objects generators alone.
        for name, value in list(dict.items(attributes(part) or {})):
            if name not in _MODULES_OWN and (not name.startswith("_") or is_a(value, _WALKED)):
                yield value
            elif name not in _MODULES_OWN:
                yield from _generators(value)
        yield from items(part)
        yield from [tensor for *_, tensor in scripted(part)]


def scripted(module: torch.nn.Module) -> list[tuple[Any, str, torch.Tensor]]:
    """Where a module of TorchScript holds tensors."""
    return scripted_places(attributes(module) or {}) if is_a(module, torch.jit.ScriptModule) else []


def _generators(value: Any, depth: int = 2) -> Iterator[torch.Generator]:
    """Those in containers and objects: a tracker of random streams. Long ones hold something else."""
    if is_a(value, torch.Generator):
        yield value
    elif depth and not is_a(value, _NO_CONTAINERS):
        for one in _contents(value, _FEW):
            yield from _generators(one, depth - 1)


def _contents(value: Any, most: int = _MOST) -> list[Any]:
    """What a container or an object holds; nothing where that is more than `most`."""
    if container_of(value) in (tuple, list, dict):
        return items(value) if length(value) <= most else []
    table = attributes(value) or {}
    return list(dict.values(table)) if len(table) <= most else []


def _inside_function(function: types.FunctionType) -> Iterator[Any]:
    yield from cells(function)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from function.__dict__.values()
    known: dict[str, Any] = function.__globals__
    values: list[Any] = [known.get(name) for name in names_in(function.__code__)]
    for value in values:
        # Library functions are not walked: what they close over is not the user's. Regions' functions are.
        if not is_a(value, types.FunctionType) or value.__globals__ is known or _is_region(value):
            yield value


def names_in(code: types.CodeType) -> Iterator[str]:
    """What code names: globals and attributes, in functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


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
    if is_tensor(value):
        return given.get(id(value), value)
    if not depth:
        return value
    if type(value) is functools.partial:
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
    if type(value) is not types.FunctionType:
        return False
    return not (value.__module__ or "").startswith(("remat.", "torch."))


def _is_region(function: types.FunctionType) -> bool:
    return hasattr(function, "__wrapped__") and function.__globals__.get("__name__", "").startswith("remat.")
