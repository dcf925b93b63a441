"""What collectives cost: bytes over a link's bandwidth, and its latency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from remat.plan.graph import CostModel
from remat.transforms import traits
from remat.transforms.joint import Joint, Op


@dataclass(frozen=True)
class Link:
    """What devices reach each other by.

    Attributes:
        node, network: bytes/s of one device inside of a node, and between nodes.
        devices: in a node.
        latency: seconds of one collective inside of a node; twice that between nodes.
    """

    node: float
    network: float
    devices: int = 8
    latency: float = 10e-6


# One direction of a vendor's peak times 0.8, as collectives of some megabytes attain.
LINKS = {
    "a100": Link(240e9, 20e9),
    "h100": Link(360e9, 40e9),
    "h200": Link(360e9, 40e9),
    "b200": Link(720e9, 40e9),
    "mi300x": Link(340e9, 40e9),
    "cpu": Link(10e9, 1e9, latency=50e-6),
}


@dataclass(frozen=True)
class Linked:
    """Prices of another model in seconds, and of collectives by their links.

    Attributes:
        model: prices all other ops.
        link: of the device.
        groups: sizes of process groups by name.
    """

    model: CostModel
    link: Link
    groups: Mapping[str, int]
    unit: str = "s"
    collectives: bool = True

    def price(self, joint: Joint, op: Op) -> float:
        """Seconds of one op: of a collective, by a ring over its group."""
        if not traits(op.target).collective:
            return self.model.price(joint, op)
        names = [arg for arg in (*op.args, *op.kwargs.values()) if isinstance(arg, str) and arg in self.groups]
        kind = str(op.target)
        if not names or "wait_tensor" in kind:
            return 0.0
        size = self.groups[names[0]]
        moved = max(sum(joint.values[v].bytes for v in vs) for vs in (op.reads, op.outputs))
        rounds = 2 if "all_reduce" in kind else 1
        apart = size > self.link.devices
        speed = self.link.network if apart else self.link.node
        return rounds * moved * (size - 1) / size / speed + self.link.latency * (2 if apart else 1)
