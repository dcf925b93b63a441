"""Which results of a forward a backward starts from, and which autograd nodes that leaves idle."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from remat.transforms.compat import engine_runs, running_node
from remat.transforms.tape.tape import nodes_behind


class Reachability:
    """The results of one forward with the autograd nodes behind each, counted from the region's first.

    A backward may start from some results only; what only the others need is then not recomputed.
    Saved-tensor hooks do not tell for which autograd node a value is packed. But nodes are numbered in the
    order in which they are made, and a node packs right after it was made.

    Args:
        outs: tensors among the results.
        start: the number of the first node that the region made.
        behind: for each of them the nodes behind it, where they are known.
    """

    __slots__ = ("behind", "everything", "outs", "start")

    def __init__(
        self, outs: Sequence[torch.Tensor], start: int, behind: tuple[frozenset[int], ...] | None = None
    ) -> None:
        self.outs, self.start = [weakref.ref(t) for t in outs], start
        self.behind = behind or tuple([_behind(t.grad_fn, start) for t in outs])
        self.everything: frozenset[int] = frozenset().union(*self.behind)

    @property
    def differ(self) -> bool:
        """Whether some result needs less than all of them together."""
        return sum(1 for nodes in self.behind if nodes) > 1 and any(
            nodes and nodes != self.everything for nodes in self.behind
        )

    def idle_without(self, present: Sequence[int]) -> frozenset[int]:
        """Nodes that no derivative of the results at `present` passes."""
        return self.everything - frozenset().union(*[self.behind[i] for i in present])

    def idle_now(self) -> frozenset[int]:
        """Nodes that the backward pass under way does not reach from any result."""
        present = []
        for i, ref in enumerate(self.outs):
            out = ref()
            # Of a result that is gone nobody knows whether something was computed from it.
            if out is None or out.grad_fn is None or engine_runs(out.grad_fn):
                present.append(i)
        # The engine does not say so of the node that the pass started from, if it is a single one.
        node = running_node()
        number = None if node is None else node._sequence_nr() - self.start
        if not any(number in self.behind[i] for i in present):
            present += [i for i, nodes in enumerate(self.behind) if number in nodes]
        return self.idle_without(present)


def _behind(node: Any, start: int) -> frozenset[int]:
    return frozenset([found._sequence_nr() - start for found in nodes_behind([node], start)])
