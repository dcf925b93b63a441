"""Gradients of a function's arguments and of what its named values are offset by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remat.transforms import (
    flatten,
    fresh_leaf,
    gradients_of,
    is_tensor,
    merge,
    reaches_other_leaves,
    split,
    unflatten,
)
from remat.transforms.compat import hooks_aside, in_transform
from remat.transforms.intermediates import Perturbations


def differentiated(
    run: Callable[[list[Tensor]], tuple[Tensor, Perturbations, list[Tensor]]],
    leaves: list[Tensor],
    at_a_level: bool = False,
) -> tuple[Tensor, list[Tensor], Perturbations, list[tuple[str, Any]], list[Tensor]]:
    """The value that `run` returns first, differentiated by `leaves` and by what the session has offset.

    `run` gets a scalar, of which it is to make every offset, so that they carry a derivative wherever they
    are made, and the leaves; what else it returns is handed through.
    """
    leaves = [torch.full((), -0.0), *leaves]
    levels = at_a_level or in_transform() or torch.is_inference_mode_enabled()
    return (_at_a_level if levels else _plainly)(run, leaves)


def offset(zero: Tensor, tensor: Tensor) -> Tensor:
    """The offset of one tensor: a negative zero, which changes no bit."""
    with torch.enable_grad():
        return zero.to(tensor.device, tensor.dtype).expand(tensor.shape)


def _plainly(run: Callable[..., Any], leaves: list[Tensor]) -> tuple[Any, ...]:
    outer = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [x if outer and x.requires_grad else fresh_leaf(x) for x in leaves]
        value, session, others = run(own)
        fresh = [mine for mine, given in zip(own, leaves, strict=True) if mine is not given]
        attached = outer and reaches_other_leaves([value], fresh)
        grads, found = _gradients(value, own[1:], session, create_graph=attached)
    if not attached:
        value, others = value.detach(), [t.detach() for t in others]
    return value, grads, session, found, others


def _at_a_level(run: Callable[..., Any], leaves: list[Tensor]) -> tuple[Any, ...]:
    rest: list[Any] = []

    def of(*leaves: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        value, session, others = run(list(leaves))
        grads, found = _gradients(value, list(leaves[1:]), session, create_graph=True)
        flat, spec = flatten(found)
        tensors, at = split(flat)
        # Only tensors leave a transform, and the offsets must not.
        session.found, session.offsets = [], []
        rest[:] = [session, spec, [None if is_tensor(x) else x for x in flat], at]
        return value, [[value, *grads], tensors, others]

    # The function is differentiated inside, at the level that this opens: the offsets are made there.
    with hooks_aside():
        _, _, ((value, *grads), tensors, others) = torch.func.vjp(of, *leaves, has_aux=True)  # type: ignore[misc]
    session, spec, blank, at = rest
    return value, grads, session, unflatten(merge(blank, at, tensors), spec), others


def _gradients(
    value: Tensor, leaves: list[Tensor], session: Perturbations, create_graph: bool
) -> tuple[list[Tensor], list[tuple[str, Any]]]:
    """Gradients of the leaves, and the session's named trees with gradients in place of offsets."""
    flat, spec = flatten(session.found)
    offsets, at = split(flat)
    wanted = [*leaves, *offsets]
    grads = gradients_of(value, wanted, create_graph) if wanted else []
    return grads[: len(leaves)], unflatten(merge(flat, at, grads[len(leaves) :]), spec)
