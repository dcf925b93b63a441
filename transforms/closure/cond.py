"""`torch.cond` in a region: the branch that the predicate chooses runs, as after an `if`.

In eager code torch.cond compiles itself, with the branches in its graph. In a region it does not: its
operator gets the branches as Python functions. The operator then refuses branches that capture tensors,
fails in the backward of a branch that returns one tensor, and under vmap it takes that tensor for a tuple of
its rows. So it is not called: the branch's ops are ops like any other, which policies see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remat.transforms.compat import (
    active_modes,
    compiled_branches,
    cond,
    intercept_compiled_cond,
    intercept_under_modes,
    is_batched_below,
    is_tracing,
    memory_is_real,
)
from remat.transforms.context import active, enclosing
from remat.transforms.pytree import flatten, unflatten

Branch = Callable[..., Any]


def choose(pred: Any, true_fn: Branch, false_fn: Branch, operands: Any) -> Any:
    """What torch.cond returns, by the branches' own ops; both of them where `vmap` batches the predicate."""
    with compiled_branches():
        if not isinstance(pred, torch.Tensor) or not is_batched_below(pred):
            return true_fn(*operands) if pred else false_fn(*operands)
        leaves, spec = flatten(true_fn(*operands))
        others, _ = flatten(false_fn(*operands))
    return unflatten([torch.where(pred, a, b) for a, b in zip(leaves, others, strict=True)], spec)


def chosen_here() -> bool:
    """Whether `choose` is what torch.cond comes down to: not in graphs, where both branches stay."""
    return memory_is_real() or (not is_tracing() and _planning())


def _planning() -> bool:
    return any(getattr(mode, "plans", False) for mode in active_modes())


def _in_region(*args: Any) -> Any:
    if len(args) != 4 or not chosen_here() or (enclosing() is None and not _planning()):
        return NotImplemented
    return choose(*args)


def _left_whole() -> bool:
    return bool(active.swaps) or enclosing() is not None or _planning()


intercept_under_modes(cond, _in_region)
intercept_compiled_cond(_left_whole)
