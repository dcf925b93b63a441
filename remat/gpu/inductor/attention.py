"""The attention kernels that a GPU takes, where a step is traced on the CPU.

torch decides by the device of the operands, below Python. So `scaled_dot_product_attention` gets a kernel of
ours for CPU tensors as long as a step is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from remat.plan.joint import attention_on_gpu
from remat.transforms.compat import modes_active, unwrapped

aten = torch.ops.aten
# Where torch asks cuDNN first: Hopper and Blackwell, by the first number of their compute capability.
_CUDNN_FIRST = (9, 10)


@contextlib.contextmanager
def attention_of_gpus(capability: tuple[int, int]) -> Iterator[None]:
    """Within, `F.scaled_dot_product_attention` on CPU tensors calls the kernel that a GPU of this compute
    capability takes, plain products where that has none."""
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
    given = query, key, value, attn_mask, dropout_p, is_causal
    if type(unwrapped(query)) is torch.Tensor and not modes_active():
        # Numbers, such as those that a planner times to price the CPU while a step is traced.
        op = aten.scaled_dot_product_attention.default
        return op.decompose(*given, scale=scale, enable_gqa=enable_gqa)
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: is_causal=True goes without attn_mask.")
    kernel = attention_on_gpu(*given, scale, enable_gqa, cudnn=cudnn)
    if kernel is not None:
        return kernel()
    op = aten._scaled_dot_product_attention_math.default
    return op(*given, scale=scale, enable_gqa=enable_gqa)[0]
