"""When a graph's recomputations have their turn, beside autograd's order (`lowering.Turn`).

A result of a region can be read in the backward outside of every region: by the gradient of a pooling behind
it. While other regions are recomputed it would be held for that. So its region is recomputed before such a
reader has its turn, which then reads what was recomputed.

What a region has sent to the host is fetched before the recomputation that is traced before its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from remat.transforms.compat import OpOverload, example_bytes, nodes_of, unwrapped
from remat.transforms.compiled.barrier import FENCE
from remat.transforms.compiled.sent import ARRIVED

Tensors = Sequence[torch.Tensor]
# The key under which a graph's nodes say which call of a region they recompute.
RECOMPUTED = "remat_recomputed"


@dataclass
class PullSpan:
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


def ahead(graph: Graph, fetched: Sequence[Any], latest: PullSpan, made: Iterable[Node], start: Node) -> None:
    """Put fetches before the recomputation of `latest`, if gradients `made` behind `start` read them."""
    behind = _behind(made, start)
    find = partial(graph.find_nodes, op="call_function")
    fences: Any = [n for n in (*find(target=FENCE), *find(target=ARRIVED)) if latest.has(n)]
    first = min(fences, default=None)
    for node in fetched:
        if first is not None and node in behind and node.args[0] < first:
            node.args = (*node.args[:2], first.args[1])
            first.prepend(node)
            # (A pull-back that fetches nothing may be the model of others, which have no such node.)
            for one in fences if latest.sends else ():
                one.args = one.args[0], [*one.args[1], node]


class Late:
    """Nodes that read a region's results before its own pull-back has begun.

    Args:
        before: the pull-backs that were traced before.
        start: the last node before its own.

    Attributes:
        after: what its recomputation waits for.
        moved: the nodes that were put before the readers.
    """

    after: torch.Tensor

    def __init__(self, before: Sequence[PullSpan], start: Node | None) -> None:
        self.before, self.start = before, start
        self.moved: set[Node] = set()
        # Results and views of them -> the result's position, and the view's operand.
        self.known: dict[Node, tuple[int, Node | None]] = {}
        self.readers: set[Node] = set()

    def find(self, position: int, result: Node) -> bool:
        """Look for readers of a result. False where regions are among them: operands are held."""
        since = next((one for one in self.before if result < one.start), None)
        if since is None:
            return True
        self.known[result] = position, None
        stack = [result]
        while stack:
            node = stack.pop()
            for user in node.users:
                if since.start < user:
                    if recomputed(user) or any(one.has(user) for one in self.before):
                        return False
                    self.readers.add(user)
                elif is_view(user) and user not in self.known:
                    self.known[user] = position, node
                    stack.append(user)
        return True

    def wait_for(self, first: Node) -> bool:
        """Take the last pull-back before a node for what comes before the recomputation."""
        for one in reversed(self.before):
            if one.end < first:
                # (A gradient of zeros comes of nothing.)
                behind = [node for node in one.made if reads([node], one.given)]
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
            if self.start is None or not self.start < node:
                return
            wanted.add(node)
            stack.extend(node.all_input_nodes)
        for node in sorted(wanted):
            first.prepend(node)
        self.moved = wanted
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
        for node in reversed([made[view] for view, (_, base) in self.known.items() if base is not None]):
            if not node.users:
                first.graph.erase_node(node)


_aten = torch.ops.aten
PRODUCTS = (_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default)


def recomputed(node: Node) -> bool:
    """Whether a node is one of a region's recomputation."""
    return RECOMPUTED in node.meta.get("custom", {})


def before_products(products: Sequence[Node], again: Callable[[Node], bool] = recomputed) -> None:
    """Let a wide activation be recomputed before its own gradient is.

    A product makes the gradient of a weight from the activation and a cotangent. Another one makes the
    activation's gradient from the same cotangent. Compilers are free to do that one first, and to fuse the
    activation with its derivative then. Such a kernel holds all that both read and write at once. So the
    other product waits for the activation. Only where the activation is wider than the cotangent, as in an
    MLP, is the memory worth one more kernel.

    Args:
        products: those of a pull-back, in the order in which they were traced.
        again: whether a node is one of the recomputation.
    """
    wide: dict[Node, list[Node]] = {}  # cotangent -> activations
    others: dict[Node, list[tuple[Node, Node]]] = {}  # cotangent -> products, each with what it reads of it
    for node in products:
        if again(node):
            continue
        left, right = [(x, looked_at(x)) for x in node.args[-2:] if isinstance(x, Node)]
        for (read, base), (_, beside) in ((left, right), (right, left)):
            if not again(beside):
                others.setdefault(base, []).append((node, read))
            elif _bytes(beside) > _bytes(base):
                wide.setdefault(base, []).append(beside)
    for cotangent, activations in wide.items():
        for product, read in others.get(cotangent, ()):
            if max(activations) < product:
                with product.graph.inserting_before(product):
                    fence = product.graph.call_function(FENCE, (read, activations))
                fence.meta = {**product.meta, **read.meta}
                product.replace_input_with(read, fence)


def looked_at(node: Node) -> Node:
    """What a node is a view of."""
    while is_view(node) or node.target is _aten._unsafe_view.default:
        node = node.all_input_nodes[0]
    return node


def _bytes(node: Node) -> int:
    val = node.meta.get("val")
    return example_bytes(val) if isinstance(val, torch.Tensor) else 0


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


def is_view(node: Node) -> bool:
    """Whether a node is another look at its operand's memory."""
    return isinstance(node.target, OpOverload) and node.target.is_view


def reads(nodes: Iterable[Node], made: Iterable[Node]) -> bool:
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
