"""What a selector keeps of one step beside the carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remat.transforms.ops import tensors_in, traits
from remat.transforms.scan.spec import Leaves, Step, Tensors
from remat.transforms.tape import OFFLOAD, SAVE, Recorder, Tape


class Kept(list[torch.Tensor]):
    """What a selector keeps of one step, and which of it belongs on the host."""

    host: tuple[bool, ...] = ()


def keep_of(
    step: Step, selector: Callable[[], Any] | None, consts: Tensors, carry: Leaves, x: Tensors
) -> tuple[Leaves, list[torch.Tensor], Kept]:
    """One step, with what a selector keeps of it."""
    if selector is None:
        return *step(consts, carry, x), Kept()
    record = _Keeping(Tape("step"), selector, [*consts, *carry, *x])
    chosen: Any = record.selector
    with chosen.watching(), record:
        new, ys = step(consts, carry, x)
    chosen.finished(record.tape)
    return new, ys, record.found()


class _Keeping(Recorder):
    """Keeps values where they are, and notes which of them belong on the host."""

    def judge(self, at: int, verdict: int, out: Any) -> None:
        super().judge(at, min(verdict, 1) * SAVE, out)
        self.tape.nodes[at].verdict = verdict

    def found(self) -> Kept:
        nodes, kept, host = self.tape.nodes, Kept(), []
        for i, value in sorted(self.kept.items()):
            root = nodes[i].root
            # A view costs nothing to take again of what is there.
            if root != i and (root < 0 or root in self.kept) and traits(nodes[i].op).view:
                continue
            values = list(tensors_in(value))
            kept += values
            host += [nodes[i].verdict == OFFLOAD] * len(values)
        kept.host = tuple(host)
        return kept
