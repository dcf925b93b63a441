"""What running an op again costs: floating point operations, a roofline, or a stopwatch.

| model | unit | an op's price |
|---|---|---|
| `Flops` | FLOP | torch's formulas for matmuls, convolutions, attention; else 0.001 per byte moved |
| `Roofline` | seconds | the larger of FLOPs over peak and bytes moved over bandwidth |
| `Measured` | seconds | the median of timed runs on this device, cached on disk (`measured`) |

Views and in-place metadata cost nothing in any of them. A collective costs 1024 FLOPs for each byte that it
moves, or that byte's time on a link.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from remat._core import DEVICES, known_flops, op_name, warn_user
from remat.plan.graph.traffic import is_view, traffic
from remat.policies import kind_of
from remat.transforms import BoundedCache, RematError, map_only, traits
from remat.transforms.joint import Joint, Op, Ref, Value

# A custom op of unknown cost counts as a matmul with this contraction: dear enough not to be rerun blindly.
UNKNOWN_FLOPS_PER_BYTE = 1024
# Below any matmul's price, above nothing: among plans of equal FLOPs the one that moves fewer bytes.
_FLOPS_PER_BYTE_MOVED = 1e-3

# What it takes until a collective begins to send.
LATENCY = 10e-6

# Ops that were warned of.
_UNKNOWN: BoundedCache[str, None] = BoundedCache(4096)


def flops_of(joint: Joint, op: Op) -> float:
    """FLOPs of one op; 0 for pointwise ops, reductions and views. Unknown custom ops are priced by size."""
    args, kwargs = map_only(Ref, lambda r: joint.values[r.id], (op.args, op.kwargs))
    outputs = tuple([joint.values[o] for o in op.outputs])
    known = known_flops(op.target, args, kwargs, outputs, lambda x: isinstance(x, Value))
    if known is not None:
        return float(known)
    name = op_name(op.target)
    if traits(op.target).functional:
        return 0.0
    if name.split("::")[0] not in ("aten", "prims", "prim", "higher_order") and op.outputs and op.forward:
        _warn_unknown(name)
        return float(UNKNOWN_FLOPS_PER_BYTE * sum(joint.values[o].bytes for o in op.outputs))
    return 0.0


def _warn_unknown(name: str) -> None:
    if name not in _UNKNOWN:
        _UNKNOWN[name] = None
        warn_user(
            f"The cost of {name} is not known; it is counted as {UNKNOWN_FLOPS_PER_BYTE} FLOPs per byte of "
            f'output (a large matmul). Say what it costs with remat.plan.register_cost("{name}", flops).'
        )


def is_heavy(joint: Joint, op: Op) -> bool:
    """What `budget="free"` never runs again: matmul, convolution, attention, collectives, custom FLOPs."""
    return kind_of(op.target) is not None or traits(op.target).functional or flops_of(joint, op) > 0


def bytes_sent(joint: Joint, op: Op) -> int:
    """Bytes that a collective moves between devices, those of the larger of operands and results; else 0."""
    if not traits(op.target).functional or is_view(joint, op):
        return 0
    return max(sum(joint.values[v].bytes for v in side) for side in (op.reads, op.outputs))


class CostModel(Protocol):
    """A price for each op.

    Attributes:
        unit: of prices, such as "FLOP" or "s".

    Example:
        >>> from remat import checkpoint_policy
        >>> class OpsAlike:
        ...     unit = "ops"
        ...     def price(self, joint, op):
        ...         return 1.0
        >>> policy = checkpoint_policy(budget=0.5, cost=OpsAlike())
    """

    @property
    def unit(self) -> str: ...

    def price(self, joint: Joint, op: Op) -> float:
        """What running `op` again costs."""
        ...


@dataclass(frozen=True)
class Flops:
    """An op costs its floating point operations, by torch's formulas.

    Other ops cost 0.001 FLOP per byte moved, so that ties go to the cheaper copies.

    Example:
        >>> from remat import checkpoint_policy
        >>> from remat.plan import Flops
        >>> checkpoint_policy(budget=0.5, cost=Flops()) == checkpoint_policy(budget=0.5, cost=Flops())
        True
    """

    unit: str = field(default="FLOP", init=False, repr=False)

    def price(self, joint: Joint, op: Op) -> float:
        sent = UNKNOWN_FLOPS_PER_BYTE * bytes_sent(joint, op)
        return flops_of(joint, op) + sent + _FLOPS_PER_BYTE_MOVED * traffic(joint, op)


@dataclass(frozen=True)
class Roofline:
    """An op costs seconds: the larger of FLOPs over peak and bytes over bandwidth of a device.

    Attributes:
        device: a key of `DEVICES`.
        fused: price as a compiler runs it: a pointwise chain costs the traffic of its ends only. An op whose
            every reader is pointwise costs nothing.

    Example:
        >>> from remat.plan import Roofline
        >>> Roofline("a100", fused=True)
        Roofline(device='a100', fused=True)
    """

    device: str = "h100"
    fused: bool = False
    unit: str = field(default="s", init=False, repr=False)

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise RematError(
                f"No roofline for device {self.device!r}: write one of {', '.join(sorted(DEVICES))}."
            )

    def price(self, joint: Joint, op: Op) -> float:
        speed = DEVICES[self.device]
        half = any(joint.values[o].dtype.itemsize <= 2 for o in op.outputs)
        compute = flops_of(joint, op) / (speed.half if half else speed.single)
        moved = (
            self._fused_traffic(joint, op) if self.fused and not is_heavy(joint, op) else traffic(joint, op)
        )
        sent = bytes_sent(joint, op)
        return max(compute, moved / speed.bandwidth) + (LATENCY + sent / speed.link if sent else 0.0)

    def _fused_traffic(self, joint: Joint, op: Op) -> int:
        """Only what comes from or goes to an op that does not fuse touches memory."""
        makers, readers = joint.producers, joint.readers
        read = (v for v in op.reads if v not in makers or is_heavy(joint, makers[v]))
        made = (o for o in op.outputs if any(is_heavy(joint, r) for r in readers.get(o, ())))
        return 0 if is_view(joint, op) else sum(joint.values[v].bytes for v in (*read, *made))


def cost_model(cost: str | CostModel, device: Any = None) -> CostModel:
    """A cost model from its name: "flops", "roofline" or "measured"; a model is returned as it is.

    `device` is a key of `DEVICES` or a torch device; None means the accelerator of this machine, else h100,
    the device that budgets are mostly planned for.
    """
    if not isinstance(cost, str):
        return cost
    if cost == "flops":
        return Flops()
    if cost == "roofline":
        return Roofline(_preset(device))
    if cost == "measured":
        from remat.plan.graph.measured import Measured

        return Measured(str(torch.device(device)) if device is not None else None)
    raise RematError(f'Unknown cost model {cost!r}: write "flops", "roofline", "measured", or a CostModel.')


def _preset(device: Any) -> str:
    if isinstance(device, str) and device in DEVICES:
        return device
    kind = _kind(device)
    if kind == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower().replace(" ", "")
        return next((key for key in DEVICES if key in name), "h100")
    return "h100"


def _kind(device: Any) -> str | None:
    if device is None:
        return None
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError):
        raise RematError(
            f"No speeds for device {device!r}: write one of {', '.join(sorted(DEVICES))}, or a torch device."
        ) from None
