"""What running an op again costs: floating point operations, a roofline, or a stopwatch.

| model | unit | an op's price |
|---|---|---|
| `Flops` | FLOP | formulas (`_core.flops`, `_core.formulas`); else 0.001 per byte moved |
| `Roofline` | seconds | the larger of FLOPs over peak and bytes moved over bandwidth (`roofline`) |
| `Measured` | seconds | the least of timed runs on this device, cached on disk (`measured`) |

Views and in-place metadata cost nothing in any of them. A collective costs 1024 FLOPs for each byte that it
moves, or that byte's time on a link.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from remat._core import DEVICES
from remat.plan.graph.flops import UNKNOWN_FLOPS_PER_BYTE, bytes_sent, flops_of
from remat.plan.graph.roofline import Roofline
from remat.plan.graph.traffic import traffic
from remat.plan.joint import Joint, Op
from remat.transforms import RematError

# Below any matmul's price, above nothing: among plans of equal FLOPs the one that moves fewer bytes.
_FLOPS_PER_BYTE_MOVED = 1e-3


class CostModel(Protocol):
    """A price for each op.

    Attributes:
        unit: of prices, such as "FLOP" or "s".

    A model whose prices are rough may also have an `accuracy`, a share of a step: 0.01 for those in seconds
    here. Where a plan saves less than that over a ready policy that fits, the policy is followed instead.

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


def cost_model(cost: str | CostModel, device: Any = None, *, compiled: bool = False) -> CostModel:
    """A cost model from its name: "flops", "roofline" or "measured"; a model is returned as it is.

    `device` is a key of `DEVICES` or a torch device. None means that of the op's tensors; tensors without
    data have the prices of an h100, the device that budgets are mostly planned for. `compiled`: price a
    roofline's ops as a compiler runs them.
    """
    if not isinstance(cost, str):
        return cost
    if cost == "flops":
        return Flops()
    if cost == "roofline":
        return Roofline(None if device is None else _known(device), compiled)
    if cost == "measured":
        from remat.plan.graph.measured import Measured

        return Measured(str(torch.device(device)) if device is not None else None)
    raise RematError(f'Unknown cost model {cost!r}: write "flops", "roofline", "measured", or a CostModel.')


def _known(device: Any) -> str:
    """The name of a device that a roofline is known of, or can be probed of."""
    if isinstance(device, str) and device in DEVICES:
        return device
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise RematError(
            f"No speeds for device {device!r}: write one of {', '.join(sorted(DEVICES))}, or a torch device."
        ) from None
    at_hand = found.type == "cpu" or (found.type == "cuda" and torch.cuda.is_available())
    return str(found) if at_hand else "h100"
