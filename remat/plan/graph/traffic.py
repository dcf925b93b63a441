"""Bytes that an op reads and writes, and those that its kernel takes meanwhile."""

from __future__ import annotations

import math

import torch

from remat.transforms.joint import CONVOLUTION, CONVOLUTION_BACKWARD, Joint, Op, Ref, gpu_workspace


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


def workspace(joint: Joint, op: Op) -> int:
    """Bytes that live while an op runs, besides what it reads and makes.

    On a CPU oneDNN copies what a convolution reads, and what its backward makes, into blocks of channels; one
    by one pixel needs none.
    """
    values = joint.values
    made = [values[one] for one in op.outputs]
    kind = made[0].device.type if made else "cpu"
    if (joint.target if kind == "meta" else kind) != "cpu":
        given = [values[one.id] if isinstance(one, Ref) else one for one in op.args]
        return gpu_workspace(op.target, given, made)
    if op.target is not CONVOLUTION and op.target is not CONVOLUTION_BACKWARD:
        return 0
    back = op.target is CONVOLUTION_BACKWARD
    refs = op.args[:3] if back else (op.args[0], *op.args[:2])
    gradient, given, weight = [values[ref.id] for ref in refs]
    if math.prod(weight.shape[2:]) == 1:
        return 0
    return max(given.bytes + gradient.bytes, weight.bytes) if back else given.bytes + weight.bytes
