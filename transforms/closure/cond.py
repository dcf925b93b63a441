"""`torch.cond` in a region: the branch that the predicate chooses runs, as after an `if`.

In eager code torch.cond compiles itself, but not under a dispatch mode, and not with a torch-function mode
that Dynamo cannot trace. Under a dispatch mode (2.11 to 2.15) its operator gets the branches as Python
functions. It refuses branches that capture tensors. It fails in the backward of a branch that returns one
tensor, and under vmap it takes that tensor for a tuple of its rows. In a region that is recorded or
recomputed the branch's ops are ops like any other, which policies see.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from remat.transforms.compat import (
    DispatchMode,
    active_modes,
    cond,
    intercept_under_modes,
    is_batched_below,
    is_tracing,
    memory_is_real,
    modes_active,
    uncompiled_branches,
)
from remat.transforms.context import enclosing
from remat.transforms.pytree import flatten, unflatten

Branch = Callable[..., Any]

# Whether torch.cond was ever called in a region: until then nothing need be done for it.
cond_met = threading.Event()


def choose(pred: Any, true_fn: Branch, false_fn: Branch, operands: Any) -> Any:
    """What torch.cond returns, by the branches' own ops; both of them where `vmap` batches the predicate."""
    cond_met.set()
    with uncompiled_branches():
        if not isinstance(pred, torch.Tensor) or not is_batched_below(pred):
            return true_fn(*operands) if pred else false_fn(*operands)
        leaves, spec = flatten(true_fn(*operands))
        others, _ = flatten(false_fn(*operands))
    return unflatten([torch.where(pred, a, b) for a, b in zip(leaves, others, strict=True)], spec)


def chosen_here() -> bool:
    """Whether `choose` is what torch.cond comes down to: not in graphs, where both branches stay."""
    return memory_is_real() or (not is_tracing() and _planning())


def kept_whole() -> contextlib.AbstractContextManager[Any]:
    """Within, torch.cond does not compile itself, so that torch-function modes meet it."""
    return _Bystander() if cond_met.is_set() and not modes_active() else contextlib.nullcontext()


def not_compiled(error: Exception) -> bool:
    """Whether `error` is Dynamo's about the first torch.cond in a region: `kept_whole` spares others."""
    if cond_met.is_set() or type(error).__module__ != "torch._dynamo.exc" or modes_active():
        return False
    cond_met.set()
    return True


class _Bystander(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _planning() -> bool:
    return any(getattr(mode, "plans", False) for mode in active_modes())


def _in_region(*args: Any) -> Any:
    if len(args) != 4 or not chosen_here() or (enclosing() is None and not _planning()):
        return NotImplemented
    return choose(*args)


intercept_under_modes(cond, _in_region)
