"""The attention kernels that a GPU takes, chosen where a step is traced on the CPU.

torch decides by the device of the operands, below Python. So `scaled_dot_product_attention` gets a kernel of
ours for CPU tensors as long as a step is traced.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from remat.transforms.compat import modes_active, unwrapped

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_MOST_WIDE = 256  # head dimension that flash attention takes
# Where torch asks cuDNN first: Hopper and Blackwell, by the first number of their compute capability.
_CUDNN_FIRST = (9, 10)


@contextlib.contextmanager
def attention_of_gpus(capability: tuple[int, int]) -> Iterator[None]:
    """Within, `F.scaled_dot_product_attention` on CPU tensors calls the kernel that a GPU of this compute
    capability takes: cuDNN's on Hopper and Blackwell where its conditions hold, else flash attention, else
    memory-efficient attention, and plain products elsewhere.

    `torch.nn.attention.sdpa_kernel` is heeded. Source: `cuda/sdp_utils.cpp` of torch, and what 2.11.0 with
    cuDNN 9.19 took on an H100 in 45 cases.
    """
    library = torch.library.Library("aten", "IMPL")
    attention = partial(_attention, capability[0] in _CUDNN_FIRST)
    try:
        for key in ("CPU", "AutogradCPU"):
            library.impl("scaled_dot_product_attention", attention, key)
        # Which kernel a key has is remembered by the op where Python dispatches, as it does in traces.
        aten.scaled_dot_product_attention.default._dispatch_cache.clear()
        yield
    finally:
        library._destroy()
        aten.scaled_dot_product_attention.default._dispatch_cache.clear()


def _attention(
    cudnn: bool,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if type(unwrapped(query)) is torch.Tensor and not modes_active():
        # Numbers, such as those that a planner times to price the CPU while a step is traced.
        rest: Any = {"scale": scale, "enable_gqa": enable_gqa}
        op = aten.scaled_dot_product_attention.default
        return op.decompose(query, key, value, attn_mask, dropout_p, is_causal, **rest)
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: is_causal=True goes without attn_mask.")
    graded = any(t.requires_grad for t in (query, key, value)) and torch.is_grad_enabled()
    if cudnn and _cudnn(query, key, value, attn_mask, dropout_p):
        # A mask stays as small as it is.
        bias = None if attn_mask is None else _numbers(attn_mask, query.dtype)
        return aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, bias, graded, dropout_p, is_causal, False, scale=scale
        )[0]
    if _flash(query, key, value, attn_mask):
        wide = query.shape[-1]
        scale = 1 / math.sqrt(wide) if scale is None else scale
        padded = [_padded(t, 8) for t in (query, key, value)]
        made = aten._scaled_dot_product_flash_attention.default(
            *padded, dropout_p, is_causal, False, scale=scale
        )[0]
        return made[..., :wide] if wide % 8 else made
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    if not grouped and _efficient(query, key, value):
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        return aten._scaled_dot_product_efficient_attention.default(
            query, key, value, bias, graded, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


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


def _flash(query: Any, key: Any, value: Any, mask: Any) -> bool:
    same = query.shape[-1] == key.shape[-1] == value.shape[-1] <= _MOST_WIDE
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and mask is None
        and query.dim() == key.dim() == value.dim() == 4
        and query.dtype in _HALF
        and same
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
