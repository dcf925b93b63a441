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
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from remat.transforms.closure.bindings import cells
from remat.transforms.closure.cond import choose, chosen_here
from remat.transforms.compat import (
    OpOverload,
    at_function_apply,
    cond,
    function_mode_at,
    function_modes,
    functions_as_they_are,
    graded_under,
    is_fake,
    is_wrapped,
    modes_active,
    next_node,
    unwrap_once,
)
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
    """The substitutions in force in this thread, and for whom the last one is noted down."""

    stack: Any = ()
    notes: Any = ()


_swaps = _Swaps()


class Missed(BaseException):
    """A captured tensor that the search had not found; the region starts again with it as an operand."""

    def __init__(self, tensor: torch.Tensor, owner: ClosureConversion) -> None:
        super().__init__()
        self.tensor, self.owner = tensor, owner

    def around(self) -> bool:
        """Whether it is a region around here that lacks the tensor, and starts again."""
        return self.owner in _swaps.stack


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


_PULLS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class ClosureConversion(TorchFunctionMode):
    """Puts operands in the place of captured tensors, and refuses captured tensors it was not told of.

    Args:
        table: id of a captured tensor -> its operand.
        operands: the region's other operands.
        captured: the captured tensors, which live as long as their ids stand in the table: a backward may
            swap for them long after the function's frame is gone.
    """

    def __init__(
        self, table: dict[int, torch.Tensor], operands: Iterable[torch.Tensor], captured: Any = ()
    ) -> None:
        super().__init__()
        self.table, self.captured = table, captured
        # An id is reused once its tensor is gone, so each entry knows its own.
        self.inside: dict[int, weakref.ref[torch.Tensor]] = {}
        self._note([*operands, *table.values()])
        self.start = next_node()
        self.met: set[int] = set()  # constants that torch functions were given
        self.pulls = (
            False  # whether it is on in a backward, whose own ends and starts are no captured tensors
        )
        self.modes = 0  # how many dispatch modes were active around it
        self.reads = True  # whether it is the function itself that calls a torch function
        self.strict = True
        self.trials = 0  # how many runs on stand-ins are going on
        self.pulled = False  # whether a region ran inside, or a backward, whose values no torch function made

    def lenient(self) -> ClosureConversion:
        """The same substitution for a later recomputation, which makes its tensors anew."""
        copy = ClosureConversion(self.table, (), self.captured)
        copy.strict = False
        return copy

    def __enter__(self) -> Any:
        stack = _swaps.__dict__.setdefault("stack", [])
        for around in stack:
            around.pulled = True
        stack.append(self)
        self.modes = modes_active()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> Any:
        _swaps.stack.pop()
        return super().__exit__(*exc)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What a dispatch mode calls and looks at while it handles an op says nothing of the function: fewer
        # modes are active there, or it is the op's overload that is called.
        self.reads = modes_active() >= self.modes and not isinstance(func, OpOverload)
        kwargs = kwargs or {}
        if not (self.pulls and func is torch.autograd.grad):
            args, kwargs = self.swap(args), self.swap(kwargs)
        if getattr(func, "__name__", "") in DOORS:
            notice(func, args)
        if func is cond and len(args) == 4 and chosen_here():
            return self._chosen(*args)
        self.pulled = self.pulled or func in _PULLS
        if func is torch.autograd.grad and not kwargs.get("is_grads_batched", True):
            # This mode is off in here; hooks and custom rules of the backward may read captured tensors.
            out = graded_under(in_backward(self), *args, **kwargs)
        else:
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
            if not self.strict:
                return value
            if not differentiable(value):
                if self.reads:
                    self.met.add(id(value))
            elif modes_active() >= self.modes and not self.is_inside(value):
                if self.trials and is_fake(value):
                    return value
                raise Missed(value, self)
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

    def is_inside(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` was made within."""
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


def noting(function: Callable[..., Any], *args: Any) -> tuple[Any, ClosureConversion | None]:
    """What `function` returns, and the substitution that it ran under."""
    notes = _swaps.__dict__.setdefault("notes", [])
    notes.append(None)
    try:
        out = function(*args)
    finally:
        last = notes.pop()
    note(last)
    return out, last


def in_backward(last: ClosureConversion | None) -> contextlib.AbstractContextManager[Any]:
    """The same substitution for the backward, where hooks and custom rules may read captured tensors too."""
    if last is None or not last.table:
        return contextlib.nullcontext()
    again = last.lenient()
    again.pulls = True
    return again


def note(conversion: ClosureConversion | None) -> None:
    """A function has run under `conversion`, or as it is."""
    if _swaps.notes:
        _swaps.notes[-1] = conversion


def _of_apply(args: tuple[Any, ...]) -> tuple[Any, ...]:
    # All substitutions that a torch function would meet here, in the same order.
    for i in reversed(range(function_modes())):
        if isinstance(mode := function_mode_at(i), ClosureConversion):
            with functions_as_they_are():
                args = tuple([mode.swap(arg) if isinstance(arg, torch.Tensor) else arg for arg in args])
    return args


at_function_apply(_of_apply)


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


def read_again(name: str, missed: Missed) -> RematError:
    """What to raise when a recomputation meets a captured tensor that the forward did not."""
    return RematError(
        f"{name}: evaluated again, it reads a tensor ({tuple(missed.tensor.shape)}) that it did not read in "
        "the forward; its gradient would be lost. A global or an attribute that changes between forward and "
        "backward must be an argument. In a scan, put it in the carry or in xs."
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
