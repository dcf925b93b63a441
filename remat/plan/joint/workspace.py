"""Memory that kernels take beside their operands and results, as far as it is known."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from remat.transforms.compat import outside_all_modes

_aten = torch.ops.aten
_ATTENTION_BACKWARDS = tuple(
    getattr(_aten, f"_scaled_dot_product_{kind}_attention_backward").default
    for kind in ("flash", "efficient", "cudnn")
)
_SUM = _aten.sum.dim_IntList
CONVOLUTION, CONVOLUTION_BACKWARD = _aten.convolution.default, _aten.convolution_backward.default


# They write a loss for each element, and what these are reduced to into the same memory, which stays.
_LOSSES = (_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.soft_margin_loss.default)
_LOSSES += (_aten.binary_cross_entropy.default,)


# oneDNN's LSTM, which leaves its backward a workspace.
RNN = _aten.mkldnn_rnn_layer.default
# What reads more bytes is not run to find out what it takes.
MOST_RUN = 1 << 30


def least_bytes(op: Any, operands: Sequence[Any], made: torch.Tensor) -> int:
    """Bytes of the memory that a result lies in, where stand-ins for tensors do not tell; 0 of other ops.

    An LSTM of a CPU is run once, on tensors of the same sizes, unless it is large.
    """
    if op not in _LOSSES and (op is not RNN or made.dtype is not torch.uint8 or made.numel()):
        return 0
    given: Any = operands[0]
    size = math.prod(given.shape) * given.dtype.itemsize
    if op is not RNN or size > MOST_RUN:
        return size
    facts = [(tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else t for t in operands]
    return _rnn_workspace(torch.is_grad_enabled(), *[tuple(f) if isinstance(f, list) else f for f in facts])


@functools.lru_cache(256)
def _rnn_workspace(graded: bool, *facts: Any) -> int:
    with outside_all_modes(), torch.set_grad_enabled(graded):
        *tensors, reverse, batches, mode, hidden, layers, biases, both, batch_first, train = facts
        given = [torch.zeros(shape, dtype=dtype) for shape, dtype in tensors]
        rest = reverse, list(batches), mode, hidden, layers, biases, both, batch_first, train
        made = RNN(*given, *rest)[3]
    return 0 if made is None else made.untyped_storage().nbytes()


def gpu_workspace(op: Any, operands: Sequence[Any], made: Sequence[Any]) -> int:
    """Bytes that live while a GPU runs an op, beside what it reads and makes; cuBLAS's are not known.

    Args:
        op: an overload.
        operands: its arguments; tensors, or what has their shape, dtype and stride.
        made: its results, likewise.
    """
    if op in _ATTENTION_BACKWARDS:
        return _attention_backward(operands[1], operands[2])
    if op is _SUM and _over_rows(operands[0], operands[1]):
        *rows, columns = operands[0].shape
        return _sum_over_rows(math.prod(rows), columns)
    return turned_bytes(op, operands, made)


def _attention_backward(query: Any, key: Any) -> int:
    """What the backward of fused attention takes.

    The gradient of the queries is added up in float32, with two numbers a row. Where queries share keys, each
    head has gradients of its own of both. Source: `mha_bwd` of FlashAttention (`flash_api.cpp`). On an H100
    under torch 2.11.0 cuDNN's took that at seven shapes. (The others copy operands that lie otherwise.)
    """
    batch, heads, rows, wide = query.shape
    size = 4 * batch * heads * rows * (wide + 2)
    if key.shape[1] != heads:
        size += 2 * batch * heads * key.shape[2] * wide * query.dtype.itemsize
    return size


# Of an H100; other cards of these years have about as many.
_PROCESSORS, _THREADS_OF_EACH = 132, 2048


def _over_rows(value: Any, dims: Any) -> bool:
    """Whether a sum is over all dimensions but the last, along which the values lie."""
    last = len(value.shape) - 1
    narrow = value.dtype in (torch.float16, torch.bfloat16, torch.float32)
    leading = last > 0 and sorted(dim % (last + 1) for dim in dims or ()) == list(range(last))
    return leading and narrow and _strides(value)[-1] == 1


def _sum_over_rows(rows: int, columns: int) -> int:
    """What a sum over rows takes, such as the gradient of a bias: sums of parts in float32.

    Many blocks share the rows of a column, and each has room for all its threads. Source: `setReduceConfig`
    and `global_memory_size` of torch's `Reduce.cuh`. On an H100 under torch 2.11.0 sums of 8192 x 512 and
    of 8192 x 768 took 32 and 48 MiB.
    """
    at_once = next(size for size in (4, 2, 1) if columns % size == 0)
    threads, wide = 512 // at_once, _power(columns // at_once)
    high = min(_power(rows), threads // min(wide, 32))
    wide = min(wide, threads // high)
    each = -(-rows // high)
    if each < 256 or not columns:
        return 0
    blocks = -(-columns // (at_once * wide))
    room = _PROCESSORS * (_THREADS_OF_EACH // (wide * high))
    shared = max(min(-(-room // blocks), -(-each // 16)), -(-each // 256)) if blocks <= room else 1
    return 4 * columns * shared * wide * at_once if shared > 1 else 0


def _power(size: int) -> int:
    """The greatest power of two that is no greater."""
    return 1 << (size.bit_length() - 1) if size else 1


def turned_bytes(op: Any, operands: Sequence[Any], made: Sequence[Any]) -> int:
    """Bytes that a convolution copies so that channels come last, on its way in and on its way out.

    cuDNN's kernels of half precision want them there. Measured on an H100 with cuDNN 9.19 in 18 shapes, all
    within 10 % but those of three channels; kernels of one pixel copy nothing in the forward.
    """
    if op is CONVOLUTION:
        given, weight, groups = operands[0], operands[1], operands[8]
        moved: list[Any] = [given, weight, *made]
    elif op is CONVOLUTION_BACKWARD:
        given, weight, groups = operands[1], operands[2], operands[9]
        moved = list(operands[:3])
    else:
        return 0
    wide, half = math.prod(weight.shape[2:]) > 1, given.dtype in (torch.float16, torch.bfloat16)
    turns = _channels_first(given) and wide and half and groups == 1
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in moved) if turns else 0


def _channels_first(image: Any) -> bool:
    return len(image.shape) == 4 and image.shape[1] > 1 and _strides(image)[1] != 1


def _strides(value: Any) -> Any:
    return value.stride() if callable(value.stride) else value.stride
