"""What a model runs before, between and after its blocks: the embedding, the head, a loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from remat.plan.graph import CostModel
from remat.plan.joint import Joint, Op
from remat.plan.peak import live_bytes
from remat.transforms import traits


@dataclass(frozen=True)
class Share:
    """What a stage runs outside of its blocks.

    Attributes:
        kept: bytes between forward and backward.
        over: the most bytes live at once, in forward or backward, over those.
        seconds: of forward and backward.
    """

    kept: int
    over: int
    seconds: float


class Around:
    """The joint graph of a model whose blocks are left out."""

    def __init__(self, joint: Joint) -> None:
        self.joint, self.count = joint, len(joint.holes)

    @cached_property
    def parts(self) -> tuple[list[list[Op]], list[list[Op]]]:
        """The ops after so many blocks: of the forward, and of the backward."""
        holes, count = self.joint.holes, self.count
        parts: tuple[list[list[Op]], list[list[Op]]]
        parts = [[] for _ in range(count + 1)], [[] for _ in range(count + 1)]
        for at, op in enumerate(self.joint.ops):
            if op.forward:
                parts[0][sum(hole.forward <= at for hole in holes)].append(op)
            else:
                begun = [number for number, hole in enumerate(holes) if 0 <= hole.backward <= at]
                parts[1][min(begun, default=count)].append(op)
        return parts

    def share(self, start: int, stop: int, model: CostModel) -> Share:
        """The share of a stage that has blocks `start` to `stop`; the first has what comes before as well."""
        joint = self.joint
        places = [*([0] if start == 0 else []), *range(start + 1, stop + 1)]
        forward = [op for place in places for op in self.parts[0][place]]
        backward = [op for place in reversed(places) for op in self.parts[1][place]]
        made = {joint.values[o].storage for op in forward for o in op.outputs}
        # Whoever called the model holds its results until the backward.
        saved = joint.held_by_nodes | {joint.values[v].storage for v in joint.results}
        kept = {s for s in made & saved if joint.owner[s] >= 0}
        tangents = (
            {v.storage for v in joint.values if v.origin == "tangent"} if stop == self.count else set[int]()
        )
        size = sum(joint.storages[s] for s in kept)
        most = live_bytes(joint, forward, start=set(), forever=kept)
        # Gradients of parameters have lines of their own, so here they go at once.
        again = live_bytes(joint, backward, start=kept | tangents, forever=set())
        seconds = sum(_price(model, joint, op) for op in (*forward, *backward))
        return Share(size, max(most, again) - size, seconds)


def _price(model: CostModel, joint: Joint, op: Op) -> float:
    return 0.0 if traits(op.target).view else model.price(joint, op)
