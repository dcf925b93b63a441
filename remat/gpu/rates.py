"""How fast a card's libraries run an op, as a share of `Device.half`, the round figure that plans have.

The shares are those of an H100 under torch 2.11.0 with cuDNN 9.19, in bfloat16 (docs/measured/gpu.md has how
far whole steps are off). Other cards are taken to be alike. In single precision nothing was measured.
"""

from __future__ import annotations

from typing import Any

import torch

from remat._core import Device, causal_share
from remat.gpu.inductor import Hollow, Launch
from remat.plan.joint import CONVOLUTION_BACKWARD, turned_bytes
from remat.transforms import tree_leaves

# A sum of `n` products in a matrix product takes as long as one of so many more: kernels begin and end. At
# 4096 that is 760 TFLOP/s for the 600 of `Device.half`, at 1024 it is 660.
_PRODUCTS, _ENDS = 1.33, 220
# Attention whose heads are `_WIDE`; narrower ones take as much longer.
_ATTENTION, _ATTENTION_BACKWARD, _WIDE = 0.93, 0.79, 128
_CONVOLUTION_BACKWARD = 0.86
# Copies that turn the channels of an image round, of the speed of the card's memory.
_TURNING = 0.7
# Which operand of a product has the dimension along which it sums, as its last.
_SUMMED = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_int_mm": 0}


def seconds_of(launch: Launch, flops: int, speeds: Device) -> float:
    """What a library's kernel takes for its bytes or its FLOPs, whichever is more.

    Args:
        launch: of an op.
        flops: the op's, all pairs of queries and keys counted; 0 where nobody knows.
        speeds: the card's.
    """
    moved = launch.read + launch.written
    turned = 2 * _turned(launch) / (_TURNING * speeds.bandwidth)
    if not flops:
        return speeds.seconds(0, moved) + turned
    types = {leaf.dtype for leaf in tree_leaves((launch.args, launch.kwargs)) if isinstance(leaf, Hollow)}
    half = bool(types & {torch.float16, torch.bfloat16})
    computed = _computed(launch, flops) / (_share(launch) if half else 1.0)
    return speeds.seconds(computed, moved, half) + turned


def _computed(launch: Launch, flops: int) -> float:
    """Of an op's FLOPs those that its kernel computes: a causal mask hides pairs."""
    first = _first(launch)
    rows = first.shape[-2] if first else 1
    return flops * causal_share(launch.op, launch.args, launch.kwargs, rows)


def _share(launch: Launch) -> float:
    name, first = launch.op._schema.name, _first(launch)
    if name in _SUMMED:
        summed: Any = launch.args[_SUMMED[name]].shape[-1]
        return _PRODUCTS * summed / (summed + _ENDS)
    if "_attention" in name and first is not None:
        narrow = min(first.shape[-1] / _WIDE, 1.0)
        return narrow * (_ATTENTION_BACKWARD if name.endswith("_backward") else _ATTENTION)
    return _CONVOLUTION_BACKWARD if launch.op is CONVOLUTION_BACKWARD else 1.0


def _first(launch: Launch) -> Hollow | None:
    """The first operand that is no vector: of attention the queries, or the gradient of what they got."""
    return next((arg for arg in launch.args if isinstance(arg, Hollow) and len(arg.shape) > 1), None)


def _turned(launch: Launch) -> int:
    """Bytes that a convolution turns round, each as often as it does: its two gradients are two kernels."""
    often = sum(launch.args[10][:2]) if launch.op is CONVOLUTION_BACKWARD else 1
    return often * turned_bytes(launch.op, launch.args, launch.outputs)
