"""Attention as a device that is not here runs it.

`F.scaled_dot_product_attention` picks a kernel by what this machine has, below Python. On tensors without
data, or for a GPU that is not here, that is its mathematical form, which keeps scores that no fused kernel
makes. So a planner, and what traces a step for a GPU, call the fused kernel by its name, by torch's own rules
of which one takes which arguments.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from remat.transforms import wraps

# The kind of device that calls on tensors without a device are planned for: "cpu", "cuda", or "cuda with
# cuDNN" where torch asks that first, on Hopper and Blackwell.
_target: ContextVar[str] = ContextVar("remat_target", default="cuda")
# Whether those on a CPU, too, stand for tensors of that device: of a job for other machines.
_all: ContextVar[bool] = ContextVar("remat_target_of_all", default=False)
_CUDNN_FIRST = ("h100", "h200", "b200")

ATTENTION: Any = F.scaled_dot_product_attention
aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_WIDEST = 256  # width of a head that the flash kernels take

Kernel = Callable[[], torch.Tensor]


@contextlib.contextmanager
def planned_for(device: Any, *, everything: bool = False) -> Iterator[None]:
    """Within, tensors without a device are planned for this one: a CPU, or else a GPU.

    With `everything` those on a CPU are, too.
    """
    name = str(device)
    token = _target.set(
        "cpu" if name.startswith("cpu") else "cuda with cuDNN" if name in _CUDNN_FIRST else "cuda"
    )
    every = _all.set(everything)
    try:
        yield
    finally:
        _all.reset(every)
        _target.reset(token)


def target_kind() -> str:
    """The kind of device that tensors without a device are planned for."""
    return _target.get()


def all_for_target() -> bool:
    """Whether what lies on a CPU is planned for another target."""
    return _all.get() and target_kind() != "cpu"


def stands_for_target(tensor: torch.Tensor) -> bool:
    """Whether a tensor is planned for the target, in place of the device where it is."""
    kind = tensor.device.type
    return elsewhere(kind) or (kind == "cpu" and all_for_target() and not wraps(tensor))


def as_on_target(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Kernel | None:
    """`F.scaled_dot_product_attention` of these as its target runs it; None where torch knows."""
    if not isinstance(query, torch.Tensor) or query.dim() != 4 or not stands_for_target(query):
        return None
    call = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    if query.device.type == "meta" and target_kind() == "cpu":
        return partial(_on_cpu, *call)
    return attention_on_gpu(*call, cudnn=target_kind() == "cuda with cuDNN")


def elsewhere(kind: str) -> bool:
    """Whether tensors are of a device that is not here."""
    return kind == "meta" or (kind == "cuda" and not torch.cuda.is_available())


def attention_on_gpu(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
    *,
    cudnn: bool,
) -> Kernel | None:
    """The fused kernel that a GPU takes: cuDNN's where torch asks that first and its conditions hold, else
    flash attention, else memory-efficient attention; None for plain products.

    `torch.nn.attention.sdpa_kernel` is heeded. Source: `cuda/sdp_utils.cpp` of torch, and what 2.11.0 with
    cuDNN 9.19 took on an H100 in 45 cases.
    """
    graded = any(t.requires_grad for t in (query, key, value)) and torch.is_grad_enabled()
    if cudnn and _cudnn(query, key, value, mask, dropout):
        # A mask stays as small as it is.
        bias = None if mask is None else _numbers(mask, query.dtype)
        op, flags = aten._scaled_dot_product_cudnn_attention.default, (dropout, causal, False)
        return lambda: op(query, key, value, bias, graded, *flags, scale=scale)[0]
    if _flash(query, key, value, mask, causal):
        return partial(_flashed, query, key, value, dropout, causal, scale)
    alone = not grouped or query.shape[-3] == key.shape[-3]
    if alone and _efficient(query, key, value):
        bias = None if mask is None else _bias(mask, query, key)
        op = aten._scaled_dot_product_efficient_attention.default
        return lambda: op(query, key, value, bias, graded, dropout, causal, scale=scale)[0]
    return None


def _flashed(query: Any, key: Any, value: Any, dropout: float, causal: bool, scale: Any) -> torch.Tensor:
    wide = query.shape[-1]
    scale = 1 / math.sqrt(wide) if scale is None else scale
    padded = [_padded(t, 8) for t in (query, key, value)]
    op = aten._scaled_dot_product_flash_attention.default
    made = op(*padded, dropout, causal, False, scale=scale)[0]
    return made[..., :wide] if wide % 8 else made


def _on_cpu(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: Any, grouped: bool
) -> torch.Tensor:
    if grouped and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    bias = None if mask is None else _numbers(mask, query.dtype).expand(*query.shape[:-1], key.shape[-2])
    op = aten._scaled_dot_product_flash_attention_for_cpu
    return op(query, key, value, dropout, causal, attn_mask=bias, scale=scale)[0]


def _cudnn(query: Any, key: Any, value: Any, mask: Any, dropout: float) -> bool:
    widths = query.shape[-1], value.shape[-1]
    narrow = max(widths) <= 128 or widths in ((192, 128), (256, 256))
    alone = key.shape[-2] == 1 or (dropout and query.shape[-2] == 1)
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and query.dim() == key.dim() == value.dim() == 4
        and query.dtype in _HALF
        and narrow
        and all(wide % 8 == 0 for wide in widths)
        and not alone
        and not (mask is not None and mask.requires_grad)
    )


def _flash(query: Any, key: Any, value: Any, mask: Any, causal: bool) -> bool:
    same = query.shape[-1] == key.shape[-1] == value.shape[-1] <= _WIDEST
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and mask is None
        and query.dim() == key.dim() == value.dim() == 4
        and query.dtype in _HALF
        and same
        and not (causal and query.shape[-2] != key.shape[-2])
    )


def _efficient(query: Any, key: Any, value: Any) -> bool:
    at_once = 8 if query.dtype in _HALF else 4
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dim() == key.dim() == value.dim() == 4
        and query.dtype in (*_HALF, torch.float32)
        and query.shape[-1] % at_once == value.shape[-1] % at_once == 0
    )


def _padded(t: torch.Tensor, to: int) -> torch.Tensor:
    missing = -t.shape[-1] % to
    return torch.nn.functional.pad(t, (0, missing)) if missing else t


def _numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as numbers to add."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as numbers to add, for every head, with rows that begin at addresses the kernel can read."""
    mask = _numbers(mask, query.dtype)
    wide = mask.shape[-1]
    padded = _padded(mask, 16)[..., :wide] if wide % 16 else mask
    return padded.expand(query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])
