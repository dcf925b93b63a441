"""Tensors that a function closes over, made into operands.

Under functorch a captured tensor belongs to the levels around the region; the region runs below them.

- Finding: a walk over cells, defaults, bound objects, modules, containers and the globals that code names.
- Swapping: a TorchFunctionMode that puts the operand in the place of the captured tensor in every torch call,
  wherever it was read from. A tensor that the walk did not find is met there, reported by `Missed`, and the
  caller starts again with it added.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from remat.transforms.closure.cond import choose, chosen_here
from remat.transforms.compat import cond, functions_as_they_are, is_fake, is_wrapped, next_node, unwrap_once
from remat.transforms.context import DOORS, notice
from remat.transforms.errors import RematError
from remat.transforms.pytree import flatten, unflatten

_ATOMS = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    types.ModuleType,
    torch.dtype,
    torch.device,
)
_MOST = 100_000
# How often a region starts over with one more captured tensor among its operands.
MOST_TRIES = 50


class _Swaps(threading.local):
    """The substitutions in force in this thread."""

    stack: Any = ()


_swaps = _Swaps()


class Missed(BaseException):
    """A captured tensor that the search had not found; the region starts again with it as an operand."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor


def differentiable(tensor: torch.Tensor) -> bool:
    """Whether a derivative or a batch dimension could be lost if `tensor` were taken for a constant."""
    return is_wrapped(tensor) or tensor.requires_grad


def captured(function: Callable[..., Any]) -> list[torch.Tensor]:
    """The tensors reachable from `function` that could carry a derivative or a batch dimension."""
    # A substitution in force would answer for its operands, where what is asked about is the captured tensor.
    with functions_as_they_are():
        return _captured(function)


def _captured(function: Callable[..., Any]) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    stack: list[Any] = [function]
    while stack and len(seen) < _MOST:
        value = stack.pop()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if differentiable(value):
                found[id(value)] = value
        else:
            stack.extend(_inside(value))
    return list(found.values())


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
    yield from _cells(function)
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


class ClosureConversion(TorchFunctionMode):
    """Puts operands in the place of captured tensors, and refuses captured tensors it was not told of.

    Args:
        table: id of a captured tensor -> its operand. The captured tensors must be alive meanwhile.
        operands: the region's other operands.
    """

    def __init__(self, table: dict[int, torch.Tensor], operands: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.table = table
        # An id is reused once its tensor is gone, so each entry knows its own.
        self.inside: dict[int, weakref.ref[torch.Tensor]] = {}
        self._note([*operands, *table.values()])
        self.start = next_node()
        self.strict = True
        self.trials = 0  # how many runs on stand-ins are going on

    def lenient(self) -> ClosureConversion:
        """The same substitution for a later recomputation, which makes its tensors anew."""
        copy = ClosureConversion(self.table, ())
        copy.strict = False
        return copy

    def __enter__(self) -> Any:
        _swaps.__dict__.setdefault("stack", []).append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> Any:
        _swaps.stack.pop()
        return super().__exit__(*exc)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.swap(args), self.swap(kwargs or {})
        if getattr(func, "__name__", "") in DOORS:
            notice(func, args)
        if func is cond and len(args) == 4 and chosen_here():
            return self._chosen(*args)
        out = func(*args, **kwargs)
        self._note(out)
        return out

    def _chosen(self, *args: Any) -> Any:
        # This mode is off in here, and what the branches capture is to be swapped as well.
        with self:
            return choose(*args)

    def swap(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self.table.get(id(value))
            if known is not None:
                return known
            if self.strict and differentiable(value) and not self._is_inside(value):
                if self.trials and is_fake(value):
                    return value
                raise Missed(value)
            return value
        if type(value) in (tuple, list):
            return type(value)([self.swap(v) for v in value])
        if type(value) is dict:
            return {k: self.swap(v) for k, v in value.items()}
        return value

    def result(self, value: Any) -> Any:
        """What stands for a result, which may be a captured tensor that no torch call has met."""
        if not isinstance(value, torch.Tensor) or is_wrapped(value):
            return self.table.get(id(value), value)
        return self.swap(value)

    def _is_inside(self, tensor: torch.Tensor) -> bool:
        while True:
            noted = self.inside.get(id(tensor))
            if noted is not None and noted() is tensor:
                return True
            if not is_wrapped(tensor):
                # What an autograd.Function returned was never the result of a torch call.
                return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= self.start
            tensor = unwrap_once(tensor)

    def _note(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            self.inside[id(out)] = weakref.ref(out)
            # Transforms inside the region hand out what their wrappers hold.
            while is_wrapped(out):
                out = unwrap_once(out)
                self.inside[id(out)] = weakref.ref(out)
        elif isinstance(out, (tuple, list)):
            for value in out:
                self._note(value)


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Within, a function is tried on fake tensors: those are no captured ones."""
    modes = list(_swaps.stack)
    for mode in modes:
        mode.trials += 1
    try:
        yield
    finally:
        for mode in modes:
            mode.trials -= 1


def changing(name: str) -> RematError:
    """What to raise when every start over meets another captured tensor."""
    return RematError(
        f"region {name!r} reads tensors that carry derivatives and that change from run to run, so they "
        "cannot be made operands. Pass them as arguments."
    )


def swapping() -> bool:
    """Whether a region around here reads its captured tensors as operands."""
    return bool(_swaps.stack)


def as_operand(tensor: torch.Tensor) -> torch.Tensor:
    """What the enclosing region, if any, has put in the place of `tensor`."""
    for mode in reversed(_swaps.stack):
        return mode.swap(tensor)
    return tensor


def as_operands(tree: Any) -> Any:
    """`tree` with what the enclosing region has put in the place of its tensors."""
    if not _swaps.stack:
        return tree
    leaves, spec = flatten(tree)
    return unflatten([as_operand(t) if isinstance(t, torch.Tensor) else t for t in leaves], spec)


def made_inside(tensors: Iterable[torch.Tensor]) -> None:
    """Tell every substitution in force that these were made inside its region."""
    for mode in _swaps.stack:
        mode._note(list(tensors))


def innermost() -> ClosureConversion | None:
    """The substitution in force on this thread."""
    stack = _swaps.stack
    return stack[-1] if stack else None


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

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        changed = self.changed()
        before = [(held, key, held.get(key)) for held, key, _ in changed]
        for held, key, tensor in changed:
            held[key] = tensor
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
        parts = _cells(value)
    elif type(value) in (list, tuple):
        parts = value
    elif type(value) is dict:
        parts = value.values()
    if depth:
        for part in parts:
            yield from _loose_tensors(part, depth - 1)


def _cells(function: types.FunctionType) -> Iterator[Any]:
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
        for held in _cells(function):
            if isinstance(held, (torch.nn.Module, functools.partial, types.MethodType)):
                yield from _modules(held)
