"""FLOPs of one op of a joint graph."""

from __future__ import annotations

from remat._core import is_light, known_flops, op_name, warn_user
from remat.plan.graph.traffic import is_view
from remat.plan.joint import Joint, Op, Ref, Value
from remat.policies import kind_of
from remat.transforms import BoundedCache, map_only, traits

# An op of unknown cost counts as a matmul with this contraction: dear enough not to be rerun blindly.
UNKNOWN_FLOPS_PER_BYTE = 1024

# Ops that were warned of.
_UNKNOWN: BoundedCache[str, None] = BoundedCache(4096)


def flops_of(joint: Joint, op: Op) -> float:
    """FLOPs of one op; 0 for what moves elements, and views. An op of unknown cost is priced by its bytes."""
    known = joint.flops.get(id(op))
    if known is None:
        known = joint.flops[id(op)] = _flops_of(joint, op)
    return known


def _flops_of(joint: Joint, op: Op) -> float:
    args, kwargs = map_only(Ref, lambda r: joint.values[r.id], (op.args, op.kwargs))
    outputs = tuple([joint.values[o] for o in op.outputs])
    known = known_flops(op.target, args, kwargs, outputs, lambda x: isinstance(x, Value))
    if known is not None:
        return float(known)
    if traits(op.target).functional or is_light(op.target) or is_view(joint, op):
        return 0.0
    if op.outputs and op.forward:
        _warn_unknown(op_name(op.target))
        return float(UNKNOWN_FLOPS_PER_BYTE * sum(joint.values[o].bytes for o in op.outputs))
    return 0.0


def _warn_unknown(name: str) -> None:
    if name not in _UNKNOWN:
        _UNKNOWN[name] = None
        warn_user(
            f"The cost of {name} is not known; it is counted as {UNKNOWN_FLOPS_PER_BYTE} FLOPs per byte of "
            f'output (a large matmul). Say what it costs with remat.register_op("{name}", flops=...).'
        )


def is_heavy(joint: Joint, op: Op) -> bool:
    """What `budget="free"` never runs again.

    Matmuls, convolutions, attention, collectives, factorizations, FFTs, custom FLOPs, and ops of unknown
    cost; no scatters, whose few FLOPs take less time than their bytes.
    """
    if kind_of(op.target) is not None or traits(op.target).functional:
        return True
    return flops_of(joint, op) > 0 and not is_light(op.target)


def bytes_sent(joint: Joint, op: Op) -> int:
    """Bytes that a collective moves between devices, those of the larger of operands and results; else 0."""
    if not traits(op.target).functional or is_view(joint, op):
        return 0
    return max(sum(joint.values[v].bytes for v in side) for side in (op.reads, op.outputs))
