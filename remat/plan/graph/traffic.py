"""Bytes that an op reads and writes."""

from __future__ import annotations

import torch

from remat.plan.joint import Joint, Op


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
