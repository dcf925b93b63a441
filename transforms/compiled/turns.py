"""When a graph's recomputations have their turn.

A fence stands behind its own cotangent. Two chains of regions whose losses are added have cotangents that
are there from the start, so a compiler might recompute blocks of both at a time, and hold the working sets
of all. Autograd's order, the reverse of the forward's, holds one.

A result of a region can be read in the backward outside of every region: by the gradient of a pooling behind
it. While other regions are recomputed it would be held for that. So its region is recomputed before such a
reader has its turn, which then reads what was recomputed.

What a region has sent to the host is fetched before the recomputation that is traced before its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from remat.transforms.compat import OpOverload, graph_task, traced, tracer_at_work, unwrapped
from remat.transforms.compiled.barrier import FENCE, fence
from remat.transforms.compiled.sent import ARRIVED

Tensors = Sequence[torch.Tensor]
# The key under which a graph's nodes say which call of a region they recompute.
RECOMPUTED = "remat_recomputed"


@dataclass
class _Pulled:
    """A pull-back in a graph: its nodes lie behind `start`, up to `end`.

    Attributes:
        task: the backward pass.
        given: nodes of its cotangents.
        made: its gradients, by their nodes.
        sends: whether it has fetched values.
        moved: those of its nodes that stand further ahead.
    """

    task: int
    start: Node
    end: Node
    given: list[Node]
    made: dict[Node, torch.Tensor]
    sends: bool
    moved: set[Node]

    def has(self, node: Node) -> bool:
        """Whether a node was made by this pull-back."""
        return (self.start < node and not self.end < node) or node in self.moved


_pulled: weakref.WeakKeyDictionary[Any, list[_Pulled]] = weakref.WeakKeyDictionary()


class Turn:
    """A pull-back that is about to be traced.

    Args:
        operands: its, with cotangents from `first` to `last`.

    Attributes:
        operands: the same, but that one of the cotangents waits for the pull-back that was traced before in
            the same pass.
    """

    def __init__(self, operands: Tensors, first: int, last: int) -> None:
        self.moved: set[Node] = set()
        found = [at for t in operands[first:last] if (at := traced(t)) is not None]
        self.operands, self.given = operands, [node for _, node in found]
        self.tracer = found[0][0] if found else None
        self.before: list[_Pulled] = _pulled.setdefault(self.tracer, []) if found else []
        self.start = _last_node(self.tracer) if found else None
        # What an earlier pass has made would be held for this one.
        same = bool(self.before) and self.before[-1].task == graph_task()
        self.latest = latest = self.before[-1] if same else None
        if latest is not None and not _reads(self.given, latest.made):
            turn = latest.made[max(latest.made)]
            self.operands = [*operands[:first], fence(operands[first], [turn]), *operands[first + 1 :]]

    def done(self, gradients: Tensors, fetched: Tensors) -> None:
        """Note the results of the pull-back, and what was fetched for it."""
        found = [(t, at[1]) for t in gradients if (at := traced(t)) is not None]
        made = {node: t for t, node in found if node.op == "call_function"}
        if self.start is None or not made:
            return
        end = _last_node(self.tracer)
        if fetched and self.latest is not None:
            behind = _behind(made, self.start)
            self._ahead([node for node in nodes_of(fetched) if node in behind], self.latest)
        sends = bool(fetched)
        self.before.append(_Pulled(graph_task(), self.start, end, self.given, made, sends, self.moved))

    def _ahead(self, fetched: Sequence[Any], latest: _Pulled) -> None:
        """Put fetches before the recomputation of `latest`."""
        find = partial(self.tracer.graph.find_nodes, op="call_function")
        fences = [n for n in (*find(target=FENCE), *find(target=ARRIVED)) if latest.has(n)]
        first = min(fences, default=None)
        for node in fetched:
            if first is not None and node.args[0] < first:
                node.args = (*node.args[:2], first.args[1])
                first.prepend(node)
                # (A pull-back that fetches nothing may be the model of others, which have no such node.)
                for one in fences if latest.sends else ():
                    one.args = one.args[0], [*one.args[1], node]

    def late_readers(self, results: Sequence[Node | None]) -> Late | None:
        """Who reads results of the region while it is not recomputed yet, but other regions were since its
        forward; None for nobody, or where a result is held anyway."""
        if tracer_at_work() is None:
            return None
        late = Late(self)
        for i, result in enumerate(results):
            if result is not None and result.op == "call_function" and not late.find(i, result):
                return None
        return late if late.readers and late.wait_for(min(late.readers)) else None


class Late:
    """Nodes that read a region's results before its own pull-back has begun.

    Attributes:
        after: what its recomputation waits for.
    """

    after: torch.Tensor

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        # Results and views of them -> the result's position, and the view's operand.
        self.known: dict[Node, tuple[int, Node | None]] = {}
        self.readers: set[Node] = set()

    def find(self, position: int, result: Node) -> bool:
        """Look for readers of a result. False where regions are among them: operands are held."""
        pulls = [one for one in self.turn.before if result < one.start]
        if not pulls:
            return True
        self.known[result] = position, None
        stack = [result]
        while stack:
            node = stack.pop()
            for user in node.users:
                if pulls[0].start < user:
                    if any(one.has(user) for one in pulls) or RECOMPUTED in user.meta.get("custom", {}):
                        return False
                    self.readers.add(user)
                elif _is_view(user) and user not in self.known:
                    self.known[user] = position, node
                    stack.append(user)
        return True

    def wait_for(self, first: Node) -> bool:
        """Take the last pull-back before a node for what comes before the recomputation."""
        for one in reversed(self.turn.before):
            if one.end < first:
                # (A gradient of zeros comes of nothing.)
                behind = [node for node in one.made if _reads([node], one.given)]
                if behind:
                    self.after = one.made[max(behind)]
                return bool(behind)
        return False

    def read_again(self, outs: Tensors) -> None:
        """Let the readers read what was recomputed, before the first of them, if it takes nothing that is
        there later, and not the result itself."""
        again = nodes_of([unwrapped(t) for t in outs])
        first = min(self.readers)
        wanted: set[Node] = set()
        stack = [again[i] for i, _ in self.known.values()]
        while stack:
            node = stack.pop()
            if node is None or node in self.known:
                return
            if node < first or node in wanted:
                continue
            if self.turn.start is None or not self.turn.start < node:
                return
            wanted.add(node)
            stack.extend(node.all_input_nodes)
        for node in sorted(wanted):
            first.prepend(node)
        self.turn.moved = wanted
        self._exchange(again, first)

    def _exchange(self, again: Sequence[Node | None], first: Node) -> None:
        made: dict[Node, Node] = {}
        for node, (position, base) in self.known.items():  # a view comes behind its operand
            if base is None:
                found = again[position]
                assert found is not None
                made[node] = found
                continue
            with first.graph.inserting_before(first):
                made[node] = first.graph.node_copy(node, lambda n: made.get(n, n))
        for reader in self.readers:
            for node, copy in made.items():
                reader.replace_input_with(node, copy)
        for node in reversed([*made.values()]):
            if not node.users:
                first.graph.erase_node(node)


def nodes_of(tensors: Iterable[torch.Tensor]) -> list[Node | None]:
    """The nodes of these tensors in the graph that is being traced."""
    found = [traced(t) for t in tensors]
    return [None if at is None else at[1] for at in found]


def _behind(nodes: Iterable[Node], start: Node) -> set[Node]:
    """What leads to these nodes, and lies behind `start`."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and start < node:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _last_node(tracer: Any) -> Node:
    return next(iter(reversed(tracer.graph.nodes)))


def _is_view(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


def _reads(nodes: Iterable[Node], made: Iterable[Node]) -> bool:
    """Whether any of these is computed from what was made."""
    stack, targets = list(nodes), set(made)
    start = min(targets)
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in targets:
            return True
        if node not in seen and start < node:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return False
