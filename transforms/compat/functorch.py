"""functorch's levels: which are active, what wraps a tensor, and how to stand below them.

Private names of torch, each with its reason. Supported: torch 2.11 to 2.15. Unless a line says otherwise a
name was tried on 2.11.0, 2.13.0 and 2.15.0 (CPU), by the whole test suite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _functorch as _functorch_c  # pyright: ignore[reportAttributeAccessIssue]
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import (
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
)
from torch._functorch.utils import (
    enable_single_level_autograd_function as enable_single_level_autograd_function,
)
from torch._functorch.vmap import restore_vmap as restore_vmap
from torch.autograd.forward_ad import _set_fwd_grad_enabled

# -- functorch levels ---------------------------------------------------------------------------------
# torch has no public way to write a rule for "a function under grad / vmap / jvp" other than
# autograd.Function, whose jvp rule evaluates the function a second time. custom_function_call is built from
# these same names.
GRAD, JVP, VMAP = TransformType.Grad, TransformType.Jvp, TransformType.Vmap
FUNCTIONALIZE = TransformType.Functionalize
SingleLevelFunction = torch.autograd.function._SingleLevelFunction
forward_grad_enabled = _set_fwd_grad_enabled

in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
wrap_for_grad: Callable[[torch.Tensor, int], torch.Tensor] = _functorch_c._wrap_for_grad
unwrap_for_grad: Callable[[torch.Tensor, int], torch.Tensor] = _functorch_c._unwrap_for_grad
unwrap_if_dead: Callable[[torch.Tensor], torch.Tensor] = _functorch_c.unwrap_if_dead
unwrap_once: Callable[[torch.Tensor], torch.Tensor] = _functorch_c.get_unwrapped
is_wrapped: Callable[[torch.Tensor], bool] = _functorch_c.is_functorch_wrapped_tensor
is_legacy_batched: Callable[[torch.Tensor], bool] = _functorch_c.is_legacy_batchedtensor
is_dead: Callable[[torch.Tensor], bool] = _functorch_c.is_dead_tensor_wrapper
is_batched: Callable[[torch.Tensor], bool] = _functorch_c.is_batchedtensor
level_of: Callable[[torch.Tensor], int] = _functorch_c.maybe_get_level
add_batch_dim: Callable[[torch.Tensor, int | None, int], torch.Tensor] = _functorch_c._add_batch_dim
unwrap_batched: Callable[[torch.Tensor, int], tuple[torch.Tensor, int | None]] = _functorch_c._unwrap_batched


def is_batched_below(tensor: torch.Tensor) -> bool:
    """Whether any level around here has a batch of this tensor."""
    while is_wrapped(tensor):
        if is_batched(tensor):
            return True
        tensor = unwrap_once(tensor)
    return False


def is_batched_anyhow(tensor: torch.Tensor) -> bool:
    """Whether writing `tensor` into a plain tensor would fail for a batch dimension.

    `torch.autograd.grad(..., is_grads_batched=True)` uses the vmap from before functorch, which has no level.
    """
    return is_wrapped(tensor) or is_legacy_batched(tensor)


# The innermost functorch level; only where there is one.
innermost_level: Callable[[], Any] = retrieve_current_functorch_interpreter
# All of them, from the outermost; None outside every transform.
level_stack: Callable[[], list[Any] | None] = _functorch_c.get_interpreter_stack


def interpreter() -> Any | None:
    """The innermost functorch level, or None outside every transform."""
    return innermost_level() if in_transform() else None


@contextlib.contextmanager
def below_levels() -> Iterator[None]:
    """Leave all functorch levels for a while: a vmapped backward asks for values that were made below it."""
    if not in_transform():
        yield
        return
    with temporarily_clear_interpreter_stack(), _snapshot_taken():
        yield


def _snapshot_taken() -> contextlib.AbstractContextManager[Any]:
    """Within, what reaches Python from a dispatch has the state of the dispatch's begin to go back to.

    A functorch level's rule runs below that point, where a tensor that dispatches to Python, as those of
    AOTAutograd do, fails an internal assertion on 2.11. (2.13 and 2.15 do without.)
    """
    key = torch._C.DispatchKey.PythonTLSSnapshot
    excluded = torch._C._dispatch_tls_local_exclude_set()
    if not excluded.has(key):
        return contextlib.nullcontext()
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded.remove(key))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor at the bottom of all functorch wrappers of `tensor`."""
    while is_wrapped(tensor):
        tensor = unwrap_once(tensor)
    return tensor


def levels() -> list[tuple[int, Any, str]]:
    """The active functorch levels from the outermost: number, kind (GRAD, VMAP, JVP, ...), vmap's
    randomness."""
    found = []
    for level in level_stack() or ():
        kind = level.key()
        chance = _functorch_c.CVmapInterpreterPtr(level).randomness().name.lower() if kind == VMAP else ""
        found.append((level.level(), kind, chance))
    return found


def batch_size(level: Any) -> Any:
    """The batch size, perhaps symbolic, of a vmap's level."""
    return _functorch_c.CVmapInterpreterPtr(level).batchSize()
