"""Tensors that a function closes over, made into operands.

Under functorch a captured tensor belongs to the levels around the region; the region runs below them.

- Swapping: a TorchFunctionMode that puts the operand in the place of the captured tensor in every torch call,
  wherever it was read from. A tensor that the walk (`bindings.captured`) did not find is met there, reported
  by `Missed`, and the caller starts again with it added.
- Refusing: TorchScript, extensions and the insides of operators on functions take a tensor past every torch
  function. Below its level such a stray loses its wrapper, and with it its derivative: ops meet the plain
  tensor inside. It is found there, below all levels, by its value.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from remat.transforms.closure.bindings import differentiable
from remat.transforms.closure.cond import choose, chosen_here
from remat.transforms.closure.paths import of_captured
from remat.transforms.compat import (
    DispatchMode,
    OpOverload,
    at_function_apply,
    cond,
    dual_level_open,
    function_mode_at,
    function_modes,
    function_stack,
    functions_as_they_are,
    graded_under,
    is_batched,
    is_dead,
    is_fake,
    is_wrapped,
    modes_active,
    next_node,
    unwrap_once,
    unwrapped,
    watch_transforms,
)
from remat.transforms.context import PAST_DISPATCH, active, node_of, notice
from remat.transforms.errors import RematError
from remat.transforms.objects import is_a, is_tensor, items
from remat.transforms.ops import ByTensor
from remat.transforms.pytree import flatten, smooth, tree_leaves, unflatten

# How often a region starts over with one more captured tensor among its operands.
MOST_TRIES = 50


class Missed(BaseException):
    """A captured tensor that the search had not found; the region starts again with it as an operand."""

    def __init__(self, tensor: torch.Tensor, owner: ClosureConversion) -> None:
        super().__init__()
        self.tensor, self.owner = tensor, owner

    def around(self) -> bool:
        """Whether it is a region around here that lacks the tensor, and starts again."""
        return self.owner in active.swaps


_PULLS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)

# What a level of torch.func has for itself, where one graph below all levels serves those around as well.
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_AT_LEVELS: Any = (torch.Tensor.register_hook, _DATA)


def _at_its_level(
    level: tuple[str, bool], func: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    if func != _DATA:
        tensor, hook = *args, *kwargs.values()
        # It is set at the innermost level, which pulls back first; others go through the same graph later.
        turns = [True] if level[0] == "own" else []
        return (tensor, lambda grad: hook(grad) if turns and turns.pop() else None), {}
    if level != ("own", False) and args[0].requires_grad:
        raise RematError(
            "a region that torch.func differentiates twice reads `.data` of a tensor. At one level that cuts "
            "off the derivatives of that level alone, which is lost below the levels. Write `.detach()`."
        )
    return args, kwargs


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
        self.note([*operands, *table.values()])
        self.start = next_node()
        self.met: set[int] = set()  # constants that torch functions were given
        self.pulls = False  # whether it is on in a backward, whose own ends and starts are not captured
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

    def in_backward(self) -> contextlib.AbstractContextManager[Any]:
        """The same for the backward, where hooks and custom rules may read captured tensors too."""
        again = self.lenient()
        again.pulls = True
        return again if self.table else contextlib.nullcontext()

    @contextlib.contextmanager
    def _all_in_backward(self) -> Iterator[None]:
        """The same for a backward inside, and for the substitutions around this one."""
        swaps = list(active.swaps)
        stack = [function_mode_at(i) for i in range(function_modes())]
        with contextlib.ExitStack() as entered:
            entered.enter_context(function_stack([mode for mode in stack if mode not in swaps]))
            for mode in swaps:
                entered.enter_context(mode.in_backward())
            yield

    def __enter__(self) -> Any:
        for around in active.swaps:
            around.pulled = True
        active.swaps.append(self)
        self.modes = modes_active()
        watch_transforms(1)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> Any:
        active.swaps.pop()
        watch_transforms(-1)
        return super().__exit__(*exc)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # it looks into modes: this one adds nothing
            return func(*args, **(kwargs or {}))
        # What a dispatch mode calls and looks at while it handles an op says nothing of the function: fewer
        # modes are active there, or it is the op's overload that is called.
        self.reads = modes_active() >= self.modes and not isinstance(func, OpOverload)
        kwargs = kwargs or {}
        if not (self.pulls and func is torch.autograd.grad):
            args, kwargs = self.swap(args), self.swap(kwargs)
        if getattr(func, "__name__", "") in PAST_DISPATCH:
            notice(func, args)
        if active.leveled is not None and func in _AT_LEVELS:
            args, kwargs = _at_its_level(active.leveled, func, args, kwargs)
        if func is cond and len(args) == 4 and chosen_here():
            return self._chosen(*args)
        self.pulled = self.pulled or func in _PULLS
        if func is torch.autograd.grad and not kwargs.get("is_grads_batched", True):
            # This mode is off in here; hooks and custom rules of the backward may read captured tensors.
            out = graded_under(self._all_in_backward(), *args, **kwargs)
            for mode in active.swaps:  # those around are asked nothing
                mode.note(out)
        else:
            out = func(*args, **kwargs)
            self.note(out)
        return out

    def _chosen(self, *args: Any) -> Any:
        # This mode is off in here, and what the branches capture is to be swapped as well.
        with self:
            return choose(*args)

    def swap(self, value: Any) -> Any:
        if is_tensor(value):
            known = self.table.get(id(value))
            if known is not None:
                return known
            if not self.strict:
                return value
            if not differentiable(value):
                if self.reads:
                    self.met.add(id(value))
            elif modes_active() >= self.modes:
                # What `torch.func.vjp` inside returns pulls back through wrappers of a level that is gone.
                if value.requires_grad and self.is_inside(value):
                    return value
                # A cache may hold it that an earlier run has filled; a region inside then knows it, too. One
                # around may capture it, whose level is gone in its backward.
                if not (differentiable(bare := _without_dead(value)) or self._around_captures(value)):
                    return bare
                if self.is_inside(value) or self.trials and is_fake(value):
                    return value
                raise Missed(value, self)
            return value
        if type(value) in (tuple, list):
            return type(value)([self.swap(v) for v in value])
        if type(value) is dict:
            return {k: self.swap(v) for k, v in value.items()}
        return value

    def _around_captures(self, tensor: torch.Tensor) -> bool:
        return any([id(tensor) in mode.table for mode in active.swaps if mode is not self])

    def of_apply(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of an `autograd.Function` or a transform, as a torch function would be given them."""
        with functions_as_they_are():
            return tuple([self.swap(arg) if is_tensor(arg) else arg for arg in args])

    def result(self, value: Any) -> Any:
        """What stands for a result, which may be a captured tensor that no torch call has met."""
        if not is_tensor(value) or is_wrapped(value):
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
                node = node_of(tensor)
                return node is not None and node._sequence_nr() >= self.start
            tensor = unwrap_once(tensor)

    def note(self, out: Any) -> None:
        """Take note of what was made within."""
        if is_tensor(out):
            self.inside[id(out)] = weakref.ref(out)
            # Transforms inside the region hand out what their wrappers hold.
            while is_wrapped(out):
                out = unwrap_once(out)
                self.inside[id(out)] = weakref.ref(out)
        elif is_a(out, (tuple, list)):
            for value in items(out):
                self.note(value)

    def note_wrapper(self, wrapper: torch.Tensor) -> None:
        """Take note of what a transform inside has put around a tensor, which is swapped by now."""
        if modes_active() >= self.modes:
            self.inside[id(wrapper)] = weakref.ref(wrapper)


at_function_apply(ClosureConversion)


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Within, a function is tried on fake tensors: those are no captured ones."""
    modes = list(active.swaps)
    for mode in modes:
        mode.trials += 1
    try:
        yield
    finally:
        for mode in modes:
            mode.trials -= 1


def read_again(name: str, missed: Missed) -> RematError:
    """What to raise when a recomputation meets a captured tensor that the forward did not."""
    return RematError(
        f"{name}: evaluated again, it reads a tensor ({tuple(missed.tensor.shape)}) that it did not read in "
        "the forward; its gradient would be lost. A global or an attribute that changes between forward and "
        "backward must be an argument. In a scan, put it in the carry or in xs."
    )


def swapping() -> bool:
    """Whether a region around here reads its captured tensors as operands."""
    return bool(active.swaps)


def as_operand(tensor: torch.Tensor) -> torch.Tensor:
    """What the enclosing region, if any, has put in the place of `tensor`."""
    known = active.swaps[-1].swap(tensor) if active.swaps else tensor
    # A pull-back may come when its level is gone, whose operands are in wrappers still.
    return known if known is not tensor or active.rerun else _without_dead(tensor)


def known_around(tensor: torch.Tensor) -> bool:
    """Whether a region or scan around, if any, has a captured tensor, too. Not so where that runs again, and
    an attribute has become another one since its forward: should the function read it, it is met there."""
    with contextlib.suppress(Missed):
        as_operand(tensor)
        return True
    return False


def as_operands(tree: Any) -> Any:
    """`tree` with what the enclosing region has put in the place of its tensors."""
    if not active.swaps:
        return tree
    leaves, spec = flatten(tree)
    return unflatten([as_operand(t) if is_tensor(t) else t for t in leaves], spec)


def made_inside(tensors: Iterable[torch.Tensor]) -> None:
    """Tell every substitution in force that these were made inside its region."""
    for mode in active.swaps:
        mode.note(list(tensors))


def innermost() -> ClosureConversion | None:
    """The substitution in force on this thread."""
    return active.swaps[-1] if active.swaps else None


# -- strays: captured tensors that nothing tells of ----------------------------------------------------------


def refuse_strays(
    name: str,
    function: Callable[..., Any],
    conversion: ClosureConversion | None,
    outside: Iterable[torch.Tensor],
) -> None:
    """Raise where one of `outside`, what ops met and the function did not make, would lose its derivative.

    Args:
        name, function: the region or scan, and the user's function.
        conversion: what `function` ran under, None if it did not run: constants that torch functions were
            given are in order.
        outside: tensors below all levels, operands left out.
    """
    # What a backward inside makes, and a tangent of an operand, are tensors of their own below all levels:
    # nobody can tell them from a stray.
    if conversion is None or conversion.pulled or dual_level_open():
        return
    with functions_as_they_are():
        strays = {id(t): t for t in outside if id(t) not in conversion.met and smooth(t)}
        lost = next((t for t in strays.values() if t.requires_grad and not conversion.is_inside(t)), None)
        if lost is None and strays:
            lost = _carrier(strays)
    if lost is not None:
        called = of_captured(function, unwrapped(lost))
        said = f"{called!r} ({tuple(lost.shape)})" if called else f"a tensor of shape {tuple(lost.shape)}"
        raise RematError(
            f"{name} reads {said} from outside without a torch function, so its derivative would be lost. "
            "TorchScript, extensions and functions given to operators on functions do that. Pass it as an "
            "argument; in a scan, put it in the carry or in xs."
        )


def _carrier(strays: dict[int, torch.Tensor]) -> torch.Tensor | None:
    """A living tensor that holds one of these and has a derivative or a batch dimension."""
    # Rare: an op met a tensor that neither the region nor any torch function knows.
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor) and is_wrapped(value) and id(unwrapped(value)) in strays:
            tensor = value
            while is_wrapped(tensor):
                if not is_dead(tensor) and (is_batched(tensor) or tensor.requires_grad):
                    return value
                tensor = unwrap_once(tensor)
    return None


_DETACH, _DEVICE = torch.ops.aten.detach.default, torch.ops.prim.device.default


class StrayWatch(DispatchMode):
    """Notes the tensors that ops meet and did not make; `known` are operands.

    Attributes:
        met: those of them, and the results, that ops met, by their ids.
    """

    def __init__(self, known: Iterable[Any]) -> None:
        super().__init__()
        self.outside: list[torch.Tensor] = []
        self.met: set[int] = set()
        self._known: ByTensor[bool] = ByTensor()
        # Looks at tensors from outside, with those: regions inside hold what they read by a look.
        self._looks: ByTensor[torch.Tensor] = ByTensor()
        for tensor in known:
            if isinstance(tensor, torch.Tensor):
                self._known.add(unwrapped(tensor), True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return func(*args)  # a tensor without data is asked by an op, which regions inside do
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self.met.add(id(value))
                if not self.knows(value) and func is not _DETACH:
                    look = self._looks.of(value)
                    value = value if look is None else look
                    self._known.add(value, True)
                    self.outside.append(value)
        with functions_as_they_are():  # regions around would take it for a call of the function's
            out = func(*args, **(kwargs or {}))
        if func is _DETACH and not self.knows(args[0]):
            self._looks.add(out, args[0])  # it ends no derivative of the levels
            return out
        made = [value for value in tree_leaves(out) if isinstance(value, torch.Tensor)]
        for value in made:
            self._known.add(value, True)
        made_inside(made)  # a backward inside makes tensors that no torch function tells of
        return out

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether an op has met this tensor, or made it."""
        return self._known.of(tensor) is not None


def _without_dead(tensor: torch.Tensor) -> torch.Tensor:
    """What a cache holds, without the wrappers of levels that are gone: torch takes one off, and no more."""
    while is_wrapped(tensor) and is_dead(tensor):
        tensor = unwrap_once(tensor)
    return tensor
