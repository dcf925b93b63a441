"""Recomputations in one order, that of the backward, also where nothing that they compute demands it.

A fence stands behind its own cotangent. Two chains of regions whose losses are added have cotangents that
are there from the start, so a compiler might recompute blocks of both at a time, and hold the working sets of
all. Autograd's order, the reverse of the forward's, holds one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from remat.transforms.compat import graph_task, traced
from remat.transforms.compiled.barrier import fence

# Of the pull-back that was traced last in a graph: the backward pass, and its gradients with their nodes.
_latest: weakref.WeakKeyDictionary[Any, tuple[int, dict[Node, torch.Tensor]]] = weakref.WeakKeyDictionary()


def in_turn(operands: Sequence[torch.Tensor], first: int, last: int) -> Sequence[torch.Tensor]:
    """The operands of a pull-back, with cotangents from `first` to `last`: one of these waits for the
    pull-back that was traced before it in the same pass."""
    found = [traced(t) for t in operands[first:last]]
    if not found or found[0] is None:
        return operands
    task, made = _latest.get(found[0][0], (None, None))
    # What an earlier pass has made would be held for this one.
    if not made or task != graph_task() or _reads([at[1] for at in found if at is not None], made):
        return operands
    turn = made[max(made)]
    return [*operands[:first], fence(operands[first], [turn]), *operands[first + 1 :]]


def done(gradients: Sequence[torch.Tensor]) -> None:
    """Note the results of a pull-back."""
    found = [(t, at) for t in gradients if (at := traced(t)) is not None and at[1].op == "call_function"]
    for _, (tracer, _) in found[:1]:
        _latest[tracer] = graph_task(), {node: t for t, (_, node) in found}


def _reads(nodes: list[Node], made: dict[Node, torch.Tensor]) -> bool:
    """Whether any of these is computed from what was made."""
    start = min(made)
    seen: set[Node] = set()
    while nodes:
        node = nodes.pop()
        if node in made:
            return True
        if node not in seen and start < node:
            seen.add(node)
            nodes.extend(node.all_input_nodes)
    return False
