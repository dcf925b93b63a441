"""From which operands a recomputation starts, so that only those pass a fence.

A fence costs a node of every graph that a compiler makes of a region, and most operands are weights, which
ops only join with something that is behind a fence already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from remat.transforms.compat import graph_storage
from remat.transforms.ops import Traits
from remat.transforms.tape import tensors_in

_aten = torch.ops.aten

# Ops that are linear in all but one operand, at this position. What decompositions make of them computes
# nothing from the others alone, nor do their derivatives, which join them with a cotangent.
_LINEAR_BESIDE = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten.convolution.default: 0,
    _aten.native_layer_norm.default: 0,
    _aten.native_group_norm.default: 0,
    _aten.add.Tensor: 0,
    _aten.sub.Tensor: 0,
    _aten.mul.Tensor: 0,
}


class Origins:
    """Follows a region's ops in a trace, and what they compute from.

    Args:
        operands: the region's, each by its position.
    """

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        self.count = len(operands)
        self.given: dict[int, list[int]] = {}  # storage -> positions
        for i, operand in enumerate(operands):
            self.given.setdefault(graph_storage(operand), []).append(i)
        self.fenced: set[int] = set()
        # Storages of results that cannot be computed without a fenced operand.
        self.behind: set[int] = set()

    def bare(self, position: int) -> bool:
        """Whether nothing is computed from this operand but together with a fenced one."""
        return position < self.count and position not in self.fenced

    def follow(self, func: Any, facts: Traits, args: Any, kwargs: Any, out: Any) -> None:
        """Take note of an op that ran."""
        read = [graph_storage(t) for t in tensors_in((*args, *kwargs.values()))]
        if facts.view and read and read[0] in self.given:
            return
        starts = read
        at = _LINEAR_BESIDE.get(func)
        if at is not None and isinstance(args[at], torch.Tensor):
            main = graph_storage(args[at])
            if main in self.given or main in self.behind:
                starts = [main]
        self.fenced.update(i for s in starts for i in self.given.get(s, ()))
        made = {graph_storage(t) for t in tensors_in(out)}
        # Addresses come again once a result is gone, so the others are taken out.
        self.behind = self.behind | made if any(map(self._behind, read)) else self.behind - made

    def _behind(self, storage: int) -> bool:
        return storage in self.behind or any(i in self.fenced for i in self.given.get(storage, ()))
