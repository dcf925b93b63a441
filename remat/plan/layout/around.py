"""What a model runs before, between and after its blocks: the embedding, the head, a loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from remat.plan.graph import CostModel
from remat.plan.joint import Joint, Op
from remat.plan.peak import live_bytes
from remat.transforms import flatten, traits, unflatten

# An empty tensor of this width marks in a joint graph where a block was called: nobody else makes one.
_MARK = 7_919_317


class _StandIn(torch.autograd.Function):
    """A block in whose place nothing runs: results of its shapes, gradients of its arguments' shapes."""

    @staticmethod
    def forward(ctx: Any, number: int, made: list[torch.Tensor], *tensors: torch.Tensor) -> Any:
        torch.empty((0, _MARK, number))
        ctx.number = number
        ctx.shapes = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        return tuple([torch.empty_like(t) for t in made])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        torch.empty((0, _MARK, ctx.number))
        wanted = zip(ctx.shapes, ctx.needs_input_grad[2:], strict=True)
        made = [
            torch.empty_strided(s, t, dtype=d, device=v) if need else None for (s, t, d, v), need in wanted
        ]
        return None, None, *made


def stand_in(number: int, made: Any, call: Any) -> Any:
    """What a block made, without running it: one op of the graph around, marked with the block's number."""
    tensors = [leaf for leaf in flatten(call)[0] if isinstance(leaf, torch.Tensor)]
    leaves, spec = flatten(made)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    results = _StandIn.apply(number, [leaves[k].detach() for k in places], *tensors)
    for place, result in zip(places, results, strict=True):  # type: ignore[arg-type]
        leaves[place] = result
    return unflatten(leaves, spec)


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
    """The joint graph of a model whose `count` blocks are stand-ins."""

    def __init__(self, joint: Joint, count: int) -> None:
        self.joint, self.count = joint, count

    @cached_property
    def parts(self) -> tuple[list[list[Op]], list[list[Op]]]:
        """The ops after so many blocks: of the forward, and of the backward."""
        parts: tuple[list[list[Op]], list[list[Op]]] = ([], [])
        for part, ops, start in (
            (parts[0], self.joint.forward, 0),
            (parts[1], self.joint.backward, self.count),
        ):
            part += [[] for _ in range(self.count + 1)]
            at = start
            for op in ops:
                number = _marked(op)
                if number is None:
                    part[at].append(op)
                else:
                    at = number + 1 if op.forward else number
        return parts

    def share(self, start: int, stop: int, model: CostModel) -> Share:
        """The share of a stage that has blocks `start` to `stop`; the first has what comes before as well."""
        joint = self.joint
        places = [*([0] if start == 0 else []), *range(start + 1, stop + 1)]
        forward = [op for place in places for op in self.parts[0][place]]
        backward = [op for place in reversed(places) for op in self.parts[1][place]]
        made = {joint.values[o].storage for op in forward for o in op.outputs}
        saved = {joint.values[v].storage for v in joint.saved}
        # Whoever called the model holds its results until the backward.
        saved |= {joint.values[v].storage for v in joint.results}
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


def _marked(op: Op) -> int | None:
    """The number of the block that this op stands for."""
    if op.args and isinstance(op.args[0], (list, tuple)) and len(op.args[0]) == 3 and op.args[0][1] == _MARK:
        return op.args[0][2]
    return None
