"""Which results of a forward a backward starts from, and which autograd nodes that leaves idle."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from remat.transforms.compat import engine_runs, running_node
from remat.transforms.context import node_of
from remat.transforms.tape.tape import nodes_behind


class Ends(NamedTuple):
    """The nodes that made the results of a forward, -1 for those of others, and the nodes behind each."""

    numbers: tuple[int, ...]
    behind: tuple[frozenset[int], ...]


class Reachability:
    """The results of one forward with the autograd nodes behind each, counted from the region's first.

    A backward may start from some results only; what only the others need is then not recomputed.
    Saved-tensor hooks do not tell for which autograd node a value is packed. But nodes are numbered in the
    order in which they are made, and a node packs right after it was made.

    Args:
        outs: tensors among the results.
        start: the number of the first node that the region made.
        known: what is behind the results of a forward with the same nodes.
    """

    __slots__ = ("behind", "ends", "everything", "outs", "start")

    def __init__(self, outs: Sequence[torch.Tensor], start: int, known: Ends | None = None) -> None:
        self.outs, self.start = [weakref.ref(t) for t in outs], start
        numbers = tuple([_number(node_of(t), start) for t in outs])
        if known is None or known.numbers != numbers:  # the same nodes, and other results of them
            known = Ends(numbers, tuple([_behind(node_of(t), start) for t in outs]))
        self.ends, self.behind = known, known.behind
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
            node = None if out is None else node_of(out)
            if node is None or engine_runs(node):
                present.append(i)
        # The engine does not say so of the node that the pass started from, if it is a single one.
        node = running_node()
        number = None if node is None else node._sequence_nr() - self.start
        if not any(number in self.behind[i] for i in present):
            present += [i for i, nodes in enumerate(self.behind) if number in nodes]
        return self.idle_without(present)


def _number(node: Any, start: int) -> int:
    return -1 if node is None else max(node._sequence_nr() - start, -1)


def _behind(node: Any, start: int) -> frozenset[int]:
    return frozenset([found._sequence_nr() - start for found in nodes_behind([node], start)])
