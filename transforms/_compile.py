"""Regions inside graphs that are being traced for a compiler.

Dynamo sees a region as one call of `torch`'s wrapper operator: it traces the user's function into a graph
module, with captured tensors lifted to operands, and leaves what is done with it to us. When the graph is
then traced below autograd, `enter` runs the region's primitive (`_primitive`) there and then, under
whatever functorch levels are
active: the recomputation is written out in the graph. A fence on all that the recomputation reads keeps the
compiler from undoing it.

Here, unlike in eager, nothing has to be skipped, freed or put back: what nobody reads is dead code that the
compiler drops.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as torch_pytree

from remat.transforms import _call, _torch, _tree
from remat.transforms._primitive import Family, Prim, call
from remat.transforms._region import Region
from remat.transforms._state import Ambient, device_kinds
from remat.transforms._written import Written

_local = threading.local()


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def bypass(enter: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `enter(graph module of fn)(*operands)` at trace time; Dynamo traces this call.

    `enter` must be a module-level function or a `functools.partial` of one with plain constants.
    """

    def apart(*args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        given = [t for t in torch_pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        # Dynamo would take the argument itself for a result from then on, also where it is what one
        # differentiates by.
        if any([t is leaf for leaf in torch_pytree.tree_leaves(out) for t in given]):
            return torch_pytree.tree_map_only(torch.Tensor, _alias, out)
        return out

    return _torch.bypassing_wrapper()(enter, apart, *args, **kwargs)


def outermost() -> bool:
    """Whether no other region is being run around here."""
    return not getattr(_local, "depth", 0) and _call.outermost()


def run(region: Region, operands: tuple[Any, ...]) -> Any:
    """Call a region whose function is a graph module over flat operands."""
    if not _torch.is_tracing() or _call.keeping_everything():
        # A backend that executes Dynamo's graph as it is, such as "eager".
        return _call.run(region, operands, {})
    outermost = not getattr(_local, "depth", 0)
    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        return _run_traced(region, operands)
    except BaseException:
        # The levels that the graph has entered would stay on this thread: nobody else leaves them.
        if outermost:
            _torch.unwind_levels()
        raise
    finally:
        _local.depth -= 1


def _teach_inductor() -> None:
    """Tell Inductor how to compile our ops, if Inductor is what will compile them."""
    if "torch._inductor.compile_fx" in sys.modules:
        from remat.transforms import _inductor  # noqa: F401


def _run_traced(region: Region, operands: tuple[Any, ...]) -> Any:
    _teach_inductor()
    if not torch.is_grad_enabled() and not _torch.in_transform():
        return region.function(*operands)
    return _TracedCall(region, operands)()


class Graph:
    """A function that Dynamo traced, as a function of flat operands.

    Where it uses torch.func inside, Dynamo has written down the numbers of the levels that were entered;
    the function runs again below and above other levels, so the numbers are shifted.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.module = module
        # How deep the levels were where Dynamo traced the region's call.
        traced = getattr(_local, "traced_depth", None)
        self.depth: int = _torch.depth() if traced is None else traced

    def __call__(self, *operands: Any) -> Any:
        return _Interpreter(self.module, self.depth).run(*operands)


class _Interpreter(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule, traced_depth: int) -> None:
        super().__init__(module)
        self.traced = traced_depth
        self.shift = _torch.depth() - traced_depth
        # Every node brings its own; what the nodes made here are tagged with comes on top.
        self.tags = _torch.tags()

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        with _torch.tagged(self.tags):
            return super().call_method(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        at = _torch.level_argument(target)
        if at is not None and args[at] > self.traced:
            args = (*args[:at], args[at] + self.shift, *args[at + 1 :])
        before = getattr(_local, "traced_depth", None)
        # For regions inside this one.
        _local.traced_depth = _torch.depth() - self.shift
        try:
            with _torch.tagged(self.tags):
                return super().call_function(target, args, kwargs)
        finally:
            _local.traced_depth = before


class _TracedCall:
    """One call of a region in a graph that is being traced."""

    def __init__(self, region: Region, operands: tuple[Any, ...]) -> None:
        self.region = region
        self.leaves = list(operands)
        self.tensors, self.at = _tree.split(self.leaves)
        self.out_leaves: list[Any] = []
        self.out_at: list[int] = []
        self.out_spec: Any = None
        ambient = Ambient(device_kinds(self.tensors))
        self.family = Family(region, ambient, world=Written())

    def __call__(self) -> Any:
        outs = call(Prim(self.body, self.family), self.tensors)
        return _tree.unflatten(_tree.merge(self.out_leaves, self.out_at, list(outs)), self.out_spec)

    def body(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.region.function(*_tree.merge(self.leaves, self.at, list(tensors)))
        leaves, self.out_spec = _tree.flatten(out)
        tensors_, self.out_at = _tree.split(leaves)
        self.out_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tuple(tensors_)
