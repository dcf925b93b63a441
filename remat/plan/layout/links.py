"""What collectives cost: what a rank sends, over the bandwidth of the links that its group has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from remat._core import DEVICES
from remat.plan.graph import LATENCY, CostModel
from remat.plan.joint import Joint, Op
from remat.transforms import traits

# A node has so many devices. Between nodes each has a link of its own: 400 Gbit/s, of which 0.8 are attained.
_NODE, _NETWORK = 8, 40e9


@dataclass(frozen=True)
class Linked:
    """Prices of another model in seconds, and of collectives by ring over their group.

    Attributes:
        model: prices all other ops.
        device: whose links there are, a key of `DEVICES`.
        groups: sizes of process groups by name.
    """

    model: CostModel
    device: str
    groups: Mapping[str, int]
    unit: str = "s"

    def price(self, joint: Joint, op: Op) -> float:
        """Seconds of one op; between nodes a collective takes twice as long until it begins to send."""
        named = [
            arg for arg in (*op.args, *op.kwargs.values()) if isinstance(arg, str) and arg in self.groups
        ]
        if not traits(op.target).functional or not named:
            return self.model.price(joint, op)
        size = self.groups[named[0]]
        moved = max(sum(joint.values[v].bytes for v in side) for side in (op.reads, op.outputs))
        rounds = 2 if "all_reduce" in op.name else 1
        near = size <= _NODE
        speed = DEVICES[self.device].link if near else _NETWORK
        return rounds * moved * (size - 1) / size / speed + LATENCY * (1 if near else 2)
