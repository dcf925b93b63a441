"""Bytes that a kernel takes while it runs, beside what it reads and makes."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from remat._core import trace_cpu
from remat.plan.graph.flops import flops_of
from remat.plan.graph.measured import described, tensor_like
from remat.plan.graph.stopwatch import alone
from remat.plan.joint import (
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    MOST_RUN,
    RNN,
    Joint,
    Op,
    Ref,
    dense,
    gpu_workspace,
)
from remat.transforms import BoundedCache, map_only, traits
from remat.transforms.compat import profiling

# What these do inside depends on shapes, strides, threads and the processor.
_LIBRARIES = ("aten.convolution", "aten._fft_", "aten.mkldnn_rnn_layer")
_LIBRARIES += ("aten._scaled_dot_product", "aten.upsample")
# (Of half precision, and of complex numbers.)
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
# These copy nothing but into their result.
_COPIES = ("clone", "_to_copy", "copy", "cat", "stack", "constant_pad_nd", "select_backward")
_RNN_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_FLOPS = 1e10  # and more are not run to find that out
_seen: BoundedCache[str, int] = BoundedCache(4096)


def workspace(joint: Joint, op: Op) -> int:
    """Bytes that live while an op runs, besides what it reads and makes.

    On a CPU what libraries do, attention, upsampling, products that are not in plain floats, and
    what copies its operands are run once, on tensors of the same sizes, unless they are large. On a GPU, and
    of large ones, it is computed.
    """
    values = joint.values
    made = [values[one] for one in op.outputs]
    kind = made[0].device.type if made else "cpu"
    if (joint.target if kind == "meta" else kind) != "cpu":
        given = [values[one.id] if isinstance(one, Ref) else one for one in op.args]
        return gpu_workspace(op.target, given, made)
    plain = not made or made[0].dtype in (torch.float32, torch.float64)
    if not op.name.startswith(_LIBRARIES if plain else (*_LIBRARIES, *_PRODUCTS)) and not _copies(joint, op):
        return 0
    size = sum(values[v].bytes for v in (*op.reads, *op.outputs))
    if kind == "cpu" and size <= MOST_RUN and flops_of(joint, op) <= _FLOPS:
        found = _measured(joint, op)
        if found is not None:
            return found
    return _computed(joint, op)


def _copies(joint: Joint, op: Op) -> bool:
    """Whether an op of a CPU may copy operands: they lie otherwise than its kernel wants them, or it computes
    in another dtype."""
    if op.mutates or not _may_copy(op.target):
        return False
    facts, read = traits(op.target), [joint.values[v] for v in op.reads]
    if torch.Tag.pointwise in op.target.tags or facts.name in ("sum", "mean"):
        return len({joint.values[v].dtype for v in (*op.reads, *op.outputs)}) > 1
    # (Of sparse ones no strides are known. Other integers may have to hold certain values.)
    turned = any(v.stride and v.stride != dense(v.shape, range(len(v.shape), 0, -1)) for v in read)
    numbers = all(v.dtype.is_floating_point or v.dtype.is_complex for v in read)
    known = numbers or facts.name.startswith(("index_select", "max_pool", "adaptive_max_pool"))
    return turned and known and not op.name.startswith(_PRODUCTS)


@functools.lru_cache(4096)
def _may_copy(target: Any) -> bool:
    # (Asked of every op in each simulation.)
    facts = traits(target)
    return facts.native and not (facts.may_draw or facts.view or facts.name in _COPIES)


def _computed(joint: Joint, op: Op) -> int:
    """What oneDNN takes: it copies what a convolution reads, and what its backward makes, into blocks of
    channels; one by one pixel needs none."""
    if op.target is not CONVOLUTION and op.target is not CONVOLUTION_BACKWARD:
        return 0
    back = op.target is CONVOLUTION_BACKWARD
    refs = op.args[:3] if back else (op.args[0], *op.args[:2])
    gradient, given, weight = [joint.values[ref.id] for ref in refs]
    if math.prod(weight.shape[2:]) == 1:
        return 0
    return max(given.bytes + gradient.bytes, weight.bytes) if back else given.bytes + weight.bytes


def _measured(joint: Joint, op: Op) -> int | None:
    """What the op takes when it runs by itself; None where that cannot be seen."""
    given = map_only(Ref, lambda r: described(joint, r), (op.args, op.kwargs))
    key = f"{op.name} {given} {torch.get_num_threads()} {torch.backends.mkldnn.enabled}"
    if key not in _seen:
        found = None if profiling() else _run(joint, op)
        if found is None:
            return None
        _seen[key] = found
    return _seen[key]


def _run(joint: Joint, op: Op) -> int | None:
    try:
        with alone("cpu"):
            args, kwargs = map_only(Ref, lambda r: tensor_like(joint, r, "cpu"), (op.args, op.kwargs))
            if op.target is _RNN_BACKWARD:
                args = _with_workspace(*args)
            seen = trace_cpu(lambda mark: (op.target(*args, **kwargs), mark()))
    except Exception:
        # Whatever keeps an op from running alone, its workspace is no reason to fail a plan.
        return None
    return seen.peak - seen.kept


def _with_workspace(*args: Any) -> tuple[Any, ...]:
    """Arguments of an LSTM's backward with what its forward leaves there, of which graphs know no size."""
    given, rest = args[:7], args[13:22]
    reverse, mode, hidden, layers, biases, train, both, batches, batch_first = rest
    with torch.enable_grad():
        made = RNN(*given, reverse, batches, mode, hidden, layers, biases, both, batch_first, train)
    return (*args[:22], made[3])
