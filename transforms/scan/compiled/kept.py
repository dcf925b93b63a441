"""What a selector keeps of one step beside the carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remat.transforms.ops import traits
from remat.transforms.scan.spec import Leaves, Step, Tensors
from remat.transforms.tape import OFFLOAD, SAVE, Node, Record, Trace, tensors_in


class Kept(list[torch.Tensor]):
    """What a selector keeps of one step, and which of it belongs on the host."""

    host: tuple[bool, ...] = ()


def keep_of(
    step: Step, selector: Callable[[], Any] | None, consts: Tensors, carry: Leaves, x: Tensors
) -> tuple[Leaves, list[torch.Tensor], Kept]:
    """One step, with what a selector keeps of it."""
    if selector is None:
        return *step(consts, carry, x), Kept()
    chosen = selector()
    record = _Keeping(Trace("step"), chosen, [*consts, *carry, *x])
    with chosen.watching(), record:
        new, ys = step(consts, carry, x)
    chosen.finished(record.trace)
    return new, ys, record.found()


class _Keeping(Record):
    """Keeps values where they are, and notes which of them belong on the host."""

    def judge(self, node: Node, verdict: int, out: Any) -> None:
        super().judge(node, min(verdict, 1) * SAVE, out)
        node.verdict = verdict

    def found(self) -> Kept:
        nodes, kept, host = self.trace.nodes, Kept(), []
        for i, node in enumerate(nodes):
            root = node.root
            # A view costs nothing to take again of what is there.
            if root != i and (root < 0 or nodes[root].kept is not None) and traits(node.op).view:
                continue
            values = list(tensors_in(node.kept))
            kept += values
            host += [node.verdict == OFFLOAD] * len(values)
        kept.host = tuple(host)
        return kept
