"""A variable of the trace: what code that Dynamo traces sets, and finds again further down the stack.

Code under Dynamo knows such variables as globals only, and a function that Dynamo traces for an operator (a
region) may write no global. The functions here are run by Dynamo itself, while it traces: what they set and
give back are its own stand-ins for values, and no op of the graph. In plain Python there is nothing set:
only a graph break leads there.

Private names of Dynamo. Tried on 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap

from remat.transforms import RematError
from remat.transforms.compat import (
    VMAP,
    batch_size,
    depth,
    exchange,
    level_stack,
    unwrap_batched,
    unwrap_for_grad,
)

# By the names that torch.func itself has for them, which Dynamo knows. Level, batch size, where to put it.
remove_batch_dim: Callable[[torch.Tensor, int, int, int], torch.Tensor] = vmap._remove_batch_dim  # pyright: ignore[reportPrivateImportUsage]
traced_unwrap: Callable[[torch.Tensor, int], torch.Tensor] = eager_transforms._unwrap_for_grad  # pyright: ignore[reportPrivateImportUsage]


def ready() -> bool:
    """Call this before any other function here: Dynamo runs it, and learns of them."""
    from torch._dynamo import allow_in_graph
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    # Function -> what Dynamo calls in its stead, with its stand-ins for the arguments.
    known: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    for function, handler in _HANDLERS.items():
        if function not in known:
            allow_in_graph(function)
            known[function] = handler
    return True


def libraries_ready() -> bool:
    """Call this before a region is traced: Dynamo runs it.

    einops notes at its first call which backend a type of tensors has. Code that Dynamo traces for an
    operator may not write that down.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    backends = sys.modules.get("einops._backends")
    if backends is not None and torch.nn.Parameter not in getattr(backends, "_type2backend", {}):
        with unset_fake_temporarily():
            one = torch.zeros(1)
            for tensor in (one, torch.nn.Parameter(one)):
                backends.get_backend(tensor)
    return True


# Not by the decorator for it, which imports Dynamo: that takes longer than all else.
for _function in (ready, libraries_ready):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def share_floats() -> None:
    """Call this before a region or a scan is traced: Dynamo then makes a value of a Python float in the
    outermost graph, where all of them find it, until this trace ends.

    It makes one where the float is first read, in a region's graph, and remembers it. The next region that
    reads the float finds a value of a graph that is over, and an assertion of Dynamo's fails. Torch's
    checkpoint dies of the same.
    """


def top() -> Any:
    """What was pushed last, None if there is nothing."""
    return None


def is_near() -> bool:
    """Whether the function at hand is traced into the graph in which `top()` was pushed.

    From an inner graph only results come out."""
    return True


def push(value: Any) -> None:
    """Let `top()` be `value`, any object that traced code made, until `pop()`."""
    raise RematError(BROKEN)


def pop() -> None:
    """Undo the last `push`."""
    raise RematError(BROKEN)


def levels_of(tensor: Any, depth: int) -> tuple[tuple[bool, int, int], ...]:
    """What to take off a tensor, in order, so that it has no functorch level deeper than `depth`: whether a
    vmap's batch (or a wrapper), the level, and the batch's size."""
    raise RematError(BROKEN)


def is_inner() -> bool:
    """Whether the code at hand is traced into the graph of an operator, such as a region."""
    return False


def made_here(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a view of all of it where the graph at hand is given it."""
    return tensor


def traced_depth() -> int:
    """The number of the innermost functorch level, 0 outside every transform."""
    raise RematError(BROKEN)


BROKEN = (
    "capture: torch.compile broke the graph inside the function that is looked into, and its names are lost. "
    "torch.compile(..., fullgraph=True) says where; or capture outside of compiled code."
)


# -- what Dynamo runs ---------------------------------------------------------------------------------


def _constant(tx: Any, value: Any) -> Any:
    from torch._dynamo.variables.builder import SourcelessBuilder

    return SourcelessBuilder.create(tx, value)


def _stack(tx: Any) -> list[tuple[Any, Any]]:
    # It ends with the attempt at tracing, whatever becomes of that.
    return vars(tx.output).setdefault("_remat_stack", [])


def _share_floats(_: Any, tx: Any) -> Any:
    from torch._dynamo.variables.builder import VariableBuilder

    usual = VariableBuilder.wrap_symfloat

    def wrap_symfloat(self: Any, value: float) -> Any:
        output = self.tx.output
        tracers = output.tracers
        output.tracers = tracers[:1]
        try:
            return usual(self, value)
        finally:
            output.tracers = tracers

    if usual.__module__ != __name__:
        exchange(VariableBuilder, "wrap_symfloat", wrap_symfloat)
        tx.output.add_cleanup_hook(lambda: exchange(VariableBuilder, "wrap_symfloat", usual))
    return _constant(tx, None)


def _top(_: Any, tx: Any) -> Any:
    stack = _stack(tx)
    return stack[-1][0] if stack else _constant(tx, None)


def _is_near(_: Any, tx: Any) -> Any:
    stack = _stack(tx)
    return _constant(tx, not stack or stack[-1][1] is tx.output.current_tracer)


def _push(_: Any, tx: Any, value: Any) -> Any:
    _stack(tx).append((value, tx.output.current_tracer))
    return _constant(tx, None)


def _pop(_: Any, tx: Any) -> Any:
    if not _stack(tx):
        raise RematError(BROKEN)
    _stack(tx).pop()
    return _constant(tx, None)


def _levels_of(_: Any, tx: Any, tensor: Any, floor: Any) -> Any:
    example, floor = tensor.as_proxy().node.meta["example_value"], floor.as_python_constant()
    found: list[tuple[bool, int, int]] = []
    wrapping: list[tuple[bool, int, int]] = []
    # Dynamo enters the levels itself, so they are open here too.
    for level in reversed(level_stack() or ()):
        number = level.level()
        if number <= floor:
            break
        if level.key() != VMAP:
            wrapping.append((False, number, 0))
            found.append(wrapping[-1])
            example = unwrap_for_grad(example, number)
            continue
        example, dim = unwrap_batched(example, number)
        # Where there is no batch its size is needed, as a number: a symbolic one is then fixed by a guard.
        found.append((True, number, int(batch_size(level)) if dim is None else 0))
        # That is an op, which the deeper levels, still open, wrap anew.
        found += wrapping
    return _constant(tx, tuple(found))


def _is_inner(_: Any, tx: Any) -> Any:
    return _constant(tx, tx.output.current_tracer.parent is not None)


def _made_here(_: Any, tx: Any, tensor: Any) -> Any:
    node = tensor.as_proxy().node
    if node.op != "placeholder" and node.graph is tx.output.current_tracer.graph:
        return tensor
    return tensor.call_method(tx, "view_as", [tensor], {})


def _depth(_: Any, tx: Any) -> Any:
    return _constant(tx, depth())


_HANDLERS = {
    share_floats: _share_floats,
    top: _top,
    is_near: _is_near,
    push: _push,
    pop: _pop,
    levels_of: _levels_of,
    is_inner: _is_inner,
    made_here: _made_here,
    traced_depth: _depth,
}
