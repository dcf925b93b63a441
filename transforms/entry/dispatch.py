"""Where it is decided which of the two ways of recomputing a region takes."""

from __future__ import annotations

from typing import Any

import torch

from remat.transforms.closure import (
    MOST_TRIES,
    Missed,
    changing,
    not_compiled,
)
from remat.transforms.closure import captured as convert_captured
from remat.transforms.compat import (
    VMAP,
    hooks_disabled,
    in_transform,
    is_hook_refusal,
    is_tracing,
    level_stack,
    modes_active,
    unwrapped,
)
from remat.transforms.compiled import GraphLowering
from remat.transforms.context import active, enclosing, inside, labelled, planning, scoped, selective_around
from remat.transforms.eager import Frame, Inputs, enclosed, stop_enclosing
from remat.transforms.functorch import FlatCall, WatchingRefused
from remat.transforms.intermediates import Mirrors, current
from remat.transforms.pytree import flatten, split
from remat.transforms.region import Region
from remat.transforms.state import RandomState


def outermost() -> bool:
    """Whether no other region is being recorded or recomputed around here."""
    return enclosing() is None and not enclosed()


def run_transparently(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` and keep what autograd keeps, regions inside it included."""
    with scoped(transparent=True):
        return function(*args, **kwargs)


def run(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `region`: by a frame in plain autograd, by the primitive under functorch levels."""
    if active.transparent:
        return region.function(*args, **kwargs)
    if in_transform():
        return _run_batched(region, args, kwargs) if _only_batched() else _run_primitive(region, args, kwargs)
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return region.function(*args, **kwargs)
    if region.cache.uses_func or hooks_disabled() is not None:
        return _run_primitive(region, args, kwargs)
    if modes_active() and is_tracing():
        # AOTAutograd without Dynamo calls no hooks.
        return _run_primitive(region, args, kwargs)
    try:
        return _run_frame(region, args, kwargs)
    except RuntimeError as error:
        if not is_hook_refusal(error):
            raise
    region.cache.uses_func = True
    return _run_primitive(region, args, kwargs)


def _run_batched(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Under `vmap` alone: where nothing is differentiated the function runs as it is.

    torch.cond, which compiles itself, refuses the primitive's modes.
    """
    if not torch.is_grad_enabled():
        return region.function(*args, **kwargs)
    tensors, _ = split(flatten((args, kwargs))[0])
    if current() or any(_graded(t) for t in (*tensors, *convert_captured(region.function))):
        return _run_primitive(region, args, kwargs)
    random = RandomState(tensors)
    out = region.function(*args, **kwargs)
    if not any(_graded(t) for t in split(flatten(out)[0])[0]):
        return out
    # Something that the function reads, and that the search has not found, is differentiated.
    random.restore()
    return _run_primitive(region, args, kwargs)


def _graded(tensor: torch.Tensor) -> bool:
    return unwrapped(tensor).requires_grad


def _only_batched() -> bool:
    """Whether `vmap` is all that torch.func does around here."""
    return all([level.key() == VMAP for level in level_stack() or ()])


def _run_frame(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs = Inputs(region, args, kwargs)
    # Offsets add ops to those that earlier calls ran; who listens is told by recording.
    key = None if region.key is None or inputs.taps or active.listeners else inputs.signature()
    # What a region around keeps decides what this one computes again.
    key = None if key is not None and enclosing() is not None and selective_around() else key
    known = None if key is None else region.traces.get(key)
    frame = Frame(inputs)
    with labelled("forward", region.name), inside():
        out = frame.forward(args, kwargs, known)
    if key is not None and (known is None or frame.tape is not known.tape):
        if (trace := frame.lesson()) is not None:
            region.traces[key] = trace
        elif known is not None:
            region.traces.pop(key, None)
    inputs.finish()
    if inputs.hooks is not None:
        stop_enclosing(inputs.hooks)
    return out


def _run_primitive(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec, tensors, at = list(args), None, list(args), []
    if kwargs or not all([isinstance(arg, torch.Tensor) for arg in args]):
        leaves, spec = flatten((args, kwargs))
        tensors, at = split(leaves)
    taps = Mirrors(lambda: _dry_run(region, args, kwargs, tensors)) if active.sessions and current() else None
    found = [*convert_captured(region.function), *(taps.offsets if taps else ())]
    random = RandomState(tensors)
    for _ in range(MOST_TRIES):
        try:
            world = GraphLowering(region) if modes_active() and is_tracing() else None
            return FlatCall(region, leaves, spec, at, tensors, found, taps, world)()
        except Missed as missed:
            if missed.around():
                raise
            if any(t is missed.tensor for t in found):
                break
            found.append(missed.tensor)
        except WatchingRefused:
            pass
        except Exception as error:
            if "is not differentiable with respect to" in str(error) and not region.cache.by_levels:
                region.cache.by_levels = True
            elif not not_compiled(error):
                raise
        # What the broken-off run drew is drawn again.
        random.restore()
    raise changing(region.name)


def _dry_run(region: Region, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
    random = RandomState(tensors)
    try:
        with torch.no_grad(), planning(region.name):
            run_transparently(region.function, args, kwargs)
    finally:
        random.restore()
