"""Which of a region's results needs which of the values that autograd saves.

A backward may start from some results only; what only the others need is then not recomputed. Saved-tensor
hooks do not tell for which autograd node a value is packed, but nodes are numbered in the order they are
made, and a node packs right after it was made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from remat.transforms.compat import engine_runs, running_node


class Reachability:
    """The results of one forward with the autograd nodes behind each, counted from the region's first.

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


def holds_unseen(outs: Sequence[torch.Tensor], start: int) -> bool:
    """Whether a node behind `outs` may read tensors that no saved-tensor hook was told of.

    What an autograd.Function writes on its context, in place of calling save_for_backward, it reads in its
    backward like anything else; so do functions in C++.
    """
    return any(map(_opaque, _nodes([t.grad_fn for t in outs], start)))


def _opaque(node: Any) -> bool:
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return any(_holds_tensor(value, 3) for value in vars(node).values())
    # What torch knows no Python class for: a function of somebody's C++ extension.
    return type(node).__name__ == "CppFunction"


def _holds_tensor(value: Any, depth: int) -> bool:
    # Our own nodes hold no tensors there, but say whether they read more than they have saved.
    if isinstance(value, torch.Tensor) or getattr(type(value), "reads_more", False):
        return True
    if isinstance(value, (tuple, list)):
        parts: Any = value
    else:
        parts = (value if isinstance(value, dict) else getattr(value, "__dict__", {})).values()
    return depth > 0 and any(_holds_tensor(part, depth - 1) for part in parts)


def _behind(node: Any, start: int) -> frozenset[int]:
    return frozenset([found._sequence_nr() - start for found in _nodes([node], start)])


def _nodes(roots: list[Any], start: int) -> Iterator[Any]:
    """The nodes behind `roots`, those included, with numbers from `start` on."""
    seen: set[int] = set()
    while roots:
        node = roots.pop()
        if node is None:
            continue
        number = node._sequence_nr()
        # Nodes that accumulate into leaves have the largest number there is.
        if number < start or number in seen:
            continue
        seen.add(number)
        yield node
        roots.extend([following for following, _ in node.next_functions])
