"""Where a primitive is differentiated: the rules of plain autograd and of a grad level, and their nodes.

A node holds the operands and what the recorded forward left (`Residuals`); its backward calls the pull-back,
which is a primitive again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from remat.transforms.compat import (
    GRAD,
    SingleLevelFunction,
    add_batch_dim,
    enable_single_level_autograd_function,
    forward_grad_enabled,
    graph_kept,
    is_batched,
    is_dead,
    is_wrapped,
    level_of,
    unwrap_batched,
    unwrap_for_grad,
    unwrap_once,
    unwrapped,
    wrap_for_grad,
)
from remat.transforms.context import inside, quiet
from remat.transforms.errors import RematError
from remat.transforms.functorch.execute import execute, execute_pull
from remat.transforms.functorch.primitive import Prim, Residuals, Tensors, call, rule
from remat.transforms.functorch.pullback import PullBack, as_differentiated
from remat.transforms.placeholders import hollow as placeholders_hollow
from remat.transforms.placeholders import metadata


@rule(None)
def at_bottom(_: None, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return BottomNode.apply(prim, *operands)
    return _run(prim, operands)


@rule(GRAD)
def grad_rule(level: Any, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    number = level.level()
    if not (torch.is_grad_enabled() and any(tracked(t, number) for t in operands)):
        with level.lower():
            outs = call(prim, [unwrap_for_grad(t, number) for t in operands])
        return tuple([wrap_for_grad(t, number) for t in outs])
    node = LevelPull if prim.own_level == number else LevelNode
    # A dual number of a level below, if not wrapped, would be taken for one of this level's.
    operands = [t if level_of(t) == number else wrap_for_grad(t, number) for t in operands]
    with enable_single_level_autograd_function():
        return node.apply(prim, level, *operands)  # pyright: ignore[reportAttributeAccessIssue]


def _run(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run a primitive's body, in eager or where else its family lives."""
    world = prim.family.world
    if prim.pulls:
        return execute_pull(prim, operands) if world is None else world.pull(prim, operands)
    with inside():
        outs = execute(prim, operands) if world is None else world.forward(prim, operands)
    # A result that is an operand itself would be taken for an in-place result by autograd.Function.
    taken = {id(t) for t in operands}
    return tuple([quiet(t.view_as, t) if id(t) in taken else t for t in outs])


def _keep(ctx: Any, prim: Prim, operands: Tensors, outs: Tensors, residuals: Residuals | None) -> None:
    """Put on a node what its backward needs."""
    ctx.prim, ctx.residuals = prim, residuals
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*[t for t in outs if not (t.is_floating_point() or t.is_complex())])
    if prim.family.world is not None:
        ctx.save_for_backward(*operands)
        return
    needed = [residuals is None or residuals.needs(t) or _tracked_below(t) for t in operands]
    ctx.save_for_backward(*[t if keep else _hollow(t) for t, keep in zip(operands, needed, strict=True)])


def _tracked_below(tensor: torch.Tensor) -> bool:
    """Whether a lower level differentiates `tensor` too: its place in that graph must then be kept."""
    while is_wrapped(tensor):
        tensor = unwrap_once(tensor)
        if tensor.requires_grad:
            return True
    return tensor.requires_grad


def _recorded(prim: Prim, mask: list[int]) -> tuple[Prim, Residuals | None]:
    """The primitive to run in the forward of a node that differentiates the operands at `mask`."""
    if prim.pulls and not _compares(prim):
        return prim, None
    recorded = as_differentiated(prim.recorded or prim.body, mask, prim.family)
    if prim.pulls:
        return replace(prim, recorded=recorded), None
    residuals = Residuals()
    masks = (*prim.masks, tuple(mask))
    return replace(prim, recorded=recorded, sinks=(*prim.sinks, residuals), masks=masks), residuals


def _backward(ctx: Any, cotangents: tuple[Any, ...], level: int | None) -> list[Any]:
    grads: list[Any] = [None] * len(ctx.needs_input_grad)
    saved = _saved(ctx)
    first = len(grads) - len(saved)
    mask = [i for i in range(len(saved)) if ctx.needs_input_grad[first + i]]
    present = [i for i, ct in enumerate(cotangents) if ct is not None]
    if not mask or not present:
        return grads
    dead = level is not None and any(is_dead(t) for t in saved)
    # A pull-back of a pull-back recomputes the same forward, so the same residuals serve.
    source = ctx.residuals or ctx.prim.source
    recorded = ctx.prim.recorded if _compares(replace(ctx.prim, source=source)) else None
    body = PullBack(recorded or ctx.prim.body, len(saved), mask, present)
    # A second derivative still pulls back from the same results of the region.
    ends = ctx.prim.present if ctx.prim.pulls else tuple(present)
    own = None if dead else level
    pull = Prim(body, ctx.prim.family, pulls=True, source=source, own_level=own, present=ends)
    pull = replace(pull, cotangents=(len(saved), len(saved) + len(present)))
    made = call(pull, [*saved, *[cotangents[i] for i in present]])
    if ctx.residuals is not None and not graph_kept():
        # Freed as the backward goes, like autograd's own saved values.
        ctx.residuals = Residuals() if ctx.residuals.recorded is None else None
        ctx.prim = replace(ctx.prim, body=_freed)
    for place, (i, grad) in enumerate(zip(mask, made, strict=True)):
        # No gradient is None in plain autograd; torch.func wants zeros.
        grads[first + i] = None if level is None and place in body.unused else grad
    return grads


def _saved(ctx: Any) -> Tensors:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        name = ctx.prim.family.region.name
        raise RematError(
            f"region {name!r}: an argument or captured tensor was written in place: {error}"
        ) from error


def _compares(prim: Prim) -> bool:
    """Whether a recomputation must run ops just as the forward did, by the same levels, those that it is not
    pulled back for included: in a graph, where kept values are told apart by what comes before them. (By
    which levels differentiate what, matmul and in-place ops on views come down to other ops.)"""
    written = None if prim.source is None else prim.source.written
    return written is not None and written.keeps and not written.tape.loose


def _freed(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
    raise RematError("a region's backward ran a second time; say retain_graph=True in the first")


def tracked(tensor: torch.Tensor, level: int) -> bool:
    return level_of(tensor) == level and tensor.requires_grad


class BottomNode(torch.autograd.Function):
    """A node of plain autograd, for regions called below functorch levels."""

    @staticmethod
    def forward(ctx: Any, prim: Prim, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask = [i for i, t in enumerate(operands) if t.requires_grad]
        run, residuals = _recorded(prim, mask)
        outs = _run(run, operands)
        _keep(ctx, prim, operands, outs, residuals)
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return tuple(_backward(ctx, cotangents, None))


class LevelNode(SingleLevelFunction):
    """A node at one functorch grad level."""

    @staticmethod
    def forward(ctx: Any, prim: Prim, level: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        number = level.level()
        ctx.level = number
        mask = [i for i, t in enumerate(operands) if tracked(t, number)]
        run, residuals = _recorded(prim, mask)
        outs = _lowered(level, run, operands)
        _keep(ctx, prim, operands, outs, residuals)
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return tuple(_backward(ctx, cotangents, ctx.level))


class LevelPull(SingleLevelFunction):
    """The pull-back at the level it belongs to: it keeps nothing, and is never differentiated there."""

    @staticmethod
    def forward(ctx: Any, prim: Prim, level: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.name = prim.family.region.name
        return _lowered(level, prim, operands)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RematError(
            f"region {ctx.name!r} is differentiated twice at one level of torch.func (torch.autograd.grad "
            "inside a torch.func transform). Nest the transforms instead: torch.func.grad of a function "
            "that calls torch.func.grad."
        )


def _lowered(level: Any, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    number = level.level()
    lowered = [unwrap_for_grad(t, number) for t in operands]
    # autograd.Function switches both kinds of derivative off; the levels below want theirs.
    with torch.enable_grad(), forward_grad_enabled(True), level.lower():
        outs = call(prim, lowered)
    return tuple([wrap_for_grad(t, number) for t in outs])


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with the same wrappers and metadata, and no memory: for operands that no backward reads."""
    if is_wrapped(tensor):
        level = level_of(tensor)
        if is_batched(tensor):
            inner, dim = unwrap_batched(tensor, level)
            return add_batch_dim(_hollow(inner), dim, level)
        return wrap_for_grad(_hollow(unwrap_once(tensor)), level)
    # A factory's result is wrapped by the level at hand.
    empty = unwrapped(quiet(placeholders_hollow, metadata(tensor)))
    empty.untyped_storage().resize_(0)
    return empty
