"""Attention as the device that is planned for runs it.

`F.scaled_dot_product_attention` picks a kernel by what this machine has. On tensors without data, or for a
GPU that is not here, that is its mathematical form, which keeps scores that no fused kernel makes.
So a planner has the fused kernel called by its name, by torch's own rules of which one takes which arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

# The kind of device that calls on tensors without a device are planned for.
_target: ContextVar[str] = ContextVar("remat_target", default="cuda")

ATTENTION: Any = F.scaled_dot_product_attention
_HALF = (torch.float16, torch.bfloat16)
_WIDEST = 256  # width of a head that the flash kernels take


@contextlib.contextmanager
def planned_for(device: Any) -> Iterator[None]:
    """Within, tensors without a device are planned for this one: a CPU, or else a GPU."""
    token = _target.set("cpu" if str(device).startswith("cpu") else "cuda")
    try:
        yield
    finally:
        _target.reset(token)


def target_kind() -> str:
    """The kind of device that tensors without a device are planned for."""
    return _target.get()


def as_on_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], torch.Tensor] | None:
    """`F.scaled_dot_product_attention(*args, **kwargs)` as its target runs it; None where torch knows.

    Sources: `aten/src/ATen/native/transformers/sdp_utils_cpp.h` and `cuda/sdp_utils.cpp` of torch 2.13.
    """
    query = args[0] if args else kwargs.get("query")
    if not isinstance(query, torch.Tensor) or query.dim() != 4 or not elsewhere(query.device.type):
        return None
    call = _Attention(*args, **kwargs)
    if query.device.type == "meta" and _target.get() == "cpu":
        return call.on_cpu
    switches = torch.backends.cuda
    if switches.flash_sdp_enabled() and call.flashes():
        return call.flash
    return call.efficient if switches.mem_efficient_sdp_enabled() and call.equal_heads() else None


def elsewhere(kind: str) -> bool:
    """Whether tensors are of a device that is not here."""
    return kind == "meta" or (kind == "cuda" and not torch.cuda.is_available())


class _Attention:
    """The arguments of a call, by name."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self.query, self.key, self.value, self.mask = query, key, value, attn_mask
        self.dropout, self.causal, self.scale, self.grouped = dropout_p, is_causal, scale, enable_gqa

    def equal_heads(self) -> bool:
        """Whether every query has a key of its own: others take groups by themselves, or not at all."""
        return not self.grouped or self.query.shape[-3] == self.key.shape[-3]

    def flashes(self) -> bool:
        """Whether the flash kernel takes it."""
        widths = {t.shape[-1] for t in (self.query, self.key, self.value)}
        square = self.query.shape[-2] == self.key.shape[-2]
        plain = self.mask is None and self.query.dtype in _HALF
        return plain and len(widths) == 1 and max(widths) <= _WIDEST and (square or not self.causal)

    def flash(self) -> torch.Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(self.query, self.key, self.value, self.dropout, self.causal, scale=self.scale)[0]

    def efficient(self) -> torch.Tensor:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        grad = any(t.requires_grad for t in (self.query, self.key, self.value)) and torch.is_grad_enabled()
        qkv, bias = (self.query, self.key, self.value), self._bias()
        return kernel(*qkv, bias, grad, self.dropout, self.causal, scale=self.scale)[0]

    def on_cpu(self) -> torch.Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        key, value = self.key, self.value
        if not self.equal_heads():
            groups = self.query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        options = {"attn_mask": self._bias(), "scale": self.scale}
        return kernel(self.query, key, value, self.dropout, self.causal, **options)[0]

    def _bias(self) -> torch.Tensor | None:
        """The mask as numbers to add, of the sizes of the scores."""
        mask = self.mask
        if mask is None:
            return None
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -torch.inf).to(self.query.dtype)
        scores = (*self.query.shape[:-1], self.key.shape[-2])
        return mask.expand(scores)
