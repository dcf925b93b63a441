"""Norms and dropout as a GPU that is planned for runs them: each is one kernel there, and saves less.

Torch takes them apart where tensors have no data. Sources: `layer_norm.cpp` and `Dropout.cpp` of torch 2.13
(`aten/src/ATen/native`); what an H100 recorded under 2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from remat.plan.joint.attention import ATTENTION, as_on_target, stands_for_target, target_kind
from remat.transforms.compat import autocasting, below_autograd, is_wrapped

aten = torch.ops.aten


def kernel_of_target(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """A torch function as its target runs it; None where torch knows."""
    if func is ATTENTION:
        return as_on_target(*args, **kwargs)
    if func is not F.rms_norm and func is not F.dropout:
        return None
    given = args[0] if args else kwargs.get("input")
    if not isinstance(given, torch.Tensor) or not stands_for_target(given) or target_kind() == "cpu":
        return None
    if is_wrapped(given) or autocasting():
        return None
    return (_rms_norm if func is F.rms_norm else _dropout)(*args, **kwargs)


def _rms_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> Callable[[], torch.Tensor] | None:
    if weight is not None and weight.dtype != input.dtype:
        return None
    return lambda: _RMSNorm.apply(input, weight, list(normalized_shape), eps)  # type: ignore[return-value]


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Callable[[], torch.Tensor] | None:
    if inplace or not training or not 0 < p < 1 or not input.numel():
        return None
    return lambda: torch.native_dropout(input, p, True)[0]


class _RMSNorm(torch.autograd.Function):
    """Of a CPU, and of nothing, autograd knows no derivative of the kernel."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, shape: Sequence[int], eps: float | None) -> Any:  # pyright: ignore
        with below_autograd():
            out, scale = aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        x, weight, scale = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:2]]
        with below_autograd():
            grads = aten._fused_rms_norm_backward.default(cotangents[0], x, ctx.shape, scale, weight, wanted)
        return *grads, None, None
