"""Bytes that an op reads and writes, and those that its kernel takes meanwhile."""

from __future__ import annotations

import math

import torch

from remat.transforms.joint import Joint, Op, attention_workspace, is_attention_backward


def is_view(joint: Joint, op: Op) -> bool:
    """Whether an op only hands out another look at storages that its arguments have."""
    if torch.Tag.inplace_view in getattr(op.target, "tags", ()):
        return True
    read = {joint.values[v].storage for v in op.reads}
    return not op.mutates and all(joint.values[o].storage in read for o in op.outputs)


def traffic(joint: Joint, op: Op) -> int:
    """Bytes an unfused op reads and writes; 0 for views."""
    if is_view(joint, op):
        return 0
    return sum(joint.values[v].bytes for v in (*op.reads, *op.outputs))


_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


def workspace(joint: Joint, op: Op) -> int:
    """Bytes that live while an op runs, besides what it reads and makes.

    On a CPU oneDNN copies what a convolution reads, and what its backward makes, into blocks of channels; one
    by one pixel needs none. On a GPU the backward of fused attention adds up in float32.
    """
    if is_attention_backward(op.target):
        query, key = (joint.values[ref.id] for ref in op.args[1:3])
        return attention_workspace(query, key)
    if op.target is not _CONVOLUTION and op.target is not _CONVOLUTION_BACKWARD:
        return 0
    back = op.target is _CONVOLUTION_BACKWARD
    refs = op.args[:3] if back else (op.args[0], *op.args[:2])
    gradient, given, weight = [joint.values[ref.id] for ref in refs]
    if given.device.type != "cpu" or math.prod(weight.shape[2:]) == 1:
        return 0
    return max(given.bytes + gradient.bytes, weight.bytes) if back else given.bytes + weight.bytes
