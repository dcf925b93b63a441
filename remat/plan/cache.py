"""Joint graphs and plans, remembered by function and input metadata."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from remat.plan.graph import Graph
from remat.transforms import flatten
from remat.transforms.closure import swapping
from remat.transforms.compat import in_transform
from remat.transforms.joint import Peeled, captured_at_levels, peel, record, record_peeled

# Entries hold on to their function, so that its identity cannot be taken by another.
_GRAPHS: OrderedDict[Hashable, tuple[Any, Graph]] = OrderedDict()
_ROOM = 256


def graph_of(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Graph:
    """The joint graph of a call, traced once per function, metadata of its arguments, and mode flags.

    Under functorch levels: the graph of what they run at the bottom.
    """
    # Below a region around, what is captured may belong to levels that are not in force here.
    captured = captured_at_levels(fn) if in_transform() or swapping() else ()
    call = peel(args, kwargs or {}, captured) if in_transform() or captured else None
    key = call_key(fn, args, kwargs or {}) if call is None else _peeled_key(fn, call)
    hit = _GRAPHS.get(key)
    if hit is None:
        # With tensors, so that torch's planner can be asked about the same graph.
        joint = record(fn, args, kwargs, tensors=True) if call is None else record_peeled(fn, call)
        hit = _GRAPHS[key] = (fn, Graph(joint))
        while len(_GRAPHS) > _ROOM:
            _GRAPHS.popitem(last=False)
    _GRAPHS.move_to_end(key)
    return hit[1]


def _peeled_key(fn: Callable[..., Any], call: Peeled) -> Hashable:
    return call_key(fn, call.leaves, {}), call.steps, str(call.spec), len(call.captured)


def call_key(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Everything that the ops of a call can depend on short of data and captured state."""
    training = _training(fn)
    while isinstance(fn, functools.partial):
        # Model libraries make a new one at every call, of the same layer.
        fn, args, kwargs = fn.func, (*fn.args, *args), fn.keywords | kwargs
    leaves, spec = flatten((args, kwargs))
    modes = (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.get_default_dtype())
    return id(_anchor(fn)), training, str(spec), tuple(_leaf(x) for x in leaves), modes


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        stride = tuple(leaf.stride()) if leaf.layout == torch.strided else ()
        held = isinstance(leaf, torch.nn.Parameter) or leaf.is_leaf
        return tuple(leaf.shape), leaf.dtype, leaf.device, stride, leaf.requires_grad, held
    return (type(leaf), leaf) if isinstance(leaf, (int, float, bool, str, bytes, type(None))) else id(leaf)


def _anchor(fn: Any) -> Any:
    """What stays the same when a bound method is looked up again."""
    return getattr(fn, "__self__", None) or fn


def _training(fn: Any) -> Hashable:
    """Training flags of the modules in plain sight: the function, its self, partial arguments, cells."""
    found = [fn, getattr(fn, "__self__", None)]
    if isinstance(fn, functools.partial):
        found += [fn.func, getattr(fn.func, "__self__", None), *fn.args, *fn.keywords.values()]
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            pass
    return getattr(fn, "__name__", None), tuple(
        m.training for x in found if isinstance(x, torch.nn.Module) for m in x.modules()
    )
