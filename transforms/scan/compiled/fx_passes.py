"""What is done to the graphs of a scan's blocks before they are compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from remat.transforms.compat import OpOverload, example_bytes
from remat.transforms.compiled import (
    CONSTANT_SHARE,
    DEAR,
    ONCE,
    PRODUCTS,
    before_products,
    constant_key,
    is_view,
)
from remat.transforms.ops import traits

aten = torch.ops.aten
_ALIASES = (aten.detach.default, aten.alias.default)


def results(module: torch.fx.GraphModule) -> list[Node]:
    """The nodes of a graph's results."""
    found: Any = module.graph.output_node().args[0]
    return list(found)


def put_in_place(module: torch.fx.GraphModule, count: int, tapes: int) -> list[bool]:
    """Let values that are known stand for those that the graph computes, and drop what is then not needed.

    The last `2 count` results are `count` known values and, in the same order, what computes them; they are
    results no longer. Known are rows of the last `tapes` inputs. Says which of these inputs are read.
    """
    outs = results(module)
    real, known, made = (
        outs[: len(outs) - 2 * count],
        outs[len(outs) - 2 * count :][:count],
        outs[len(outs) - count :],
    )
    module.graph.output_node().args = (real,)
    done: set[Node] = set()
    start = next(node for node in module.graph.nodes if node.op != "placeholder")
    computed: Any
    for value, computed in zip(known, made, strict=True):
        node = computed
        if value is not start:
            start.prepend(value)  # rows of inputs: they must be there before all else
        while _same(node):
            node = node.args[0]
        if node.op != "call_function" or node in done:
            continue  # an input of the graph is there anyway; one value may be two results
        done.add(node)
        node.replace_all_uses_with(value)
    _clean(module)
    inputs = module.graph.find_nodes(op="placeholder")
    return [bool(node.users) for node in inputs[len(inputs) - tapes :]] if tapes else []


def only_rows_viewed(module: torch.fx.GraphModule) -> None:
    """Let the gradient of an only row be a view of it: `select_backward` copies it into zeros.

    Dynamo's graph of a step takes its row out of a tensor of one row. What reads the result may count on
    its layout, which is that of the row if that one is contiguous.
    """
    graph: Any = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.select_backward.default):
        row, sizes, dim, _ = node.args
        if sizes[dim] == 1 and row.meta["val"].is_contiguous():
            with graph.inserting_before(node):
                view = graph.call_function(aten.unsqueeze.default, (row, dim))
            view.meta = dict(node.meta)
            node.replace_all_uses_with(view)
    _clean(module)


def _same(node: Node) -> bool:
    """Whether a node is its operand under another name."""
    if node.target is not aten.view.default:
        return node.target in _ALIASES
    operand = node.args[0]
    assert isinstance(operand, Node)
    return operand.meta["val"].shape == node.meta["val"].shape


def activations_first(module: torch.fx.GraphModule, cotangents: range) -> None:
    """Let a wide activation be computed before the product that makes its gradient.

    `cotangents` are positions of inputs.
    """
    pulled = {node for i, node in enumerate(module.graph.find_nodes(op="placeholder")) if i in cotangents}
    for node in module.graph.nodes:
        if any(operand in pulled for operand in node.all_input_nodes):
            pulled.add(node)
    products = [node for node in module.graph.nodes if node.target in PRODUCTS]
    before_products(products, lambda node: node.op == "call_function" and node not in pulled)
    module.recompile()


def constants_once(module: torch.fx.GraphModule) -> None:
    """Let what depends on nothing that a block is given, such as rotary tables, be computed once in it.

    Compilers compute it in every kernel that reads it, sines and all: in two Llama blocks on an H100 that
    took 3.3 of 44.5 ms.
    """
    graph: Any = module.graph
    inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    room = CONSTANT_SHARE * max((example_bytes(t) for t in inputs if isinstance(t, torch.Tensor)), default=0)
    made: dict[Any, Node] = {}
    dear = _dear(graph)
    for node, key in dear.items():
        value = node.meta["val"]
        if is_view(node) or not _is_read(node, dear):
            continue
        if key not in made:
            if (room := room - example_bytes(value)) < 0:
                break
            with graph.inserting_after(node):
                made[key] = graph.call_function(ONCE, (node,))
            made[key].meta = dict(node.meta)
        for user in list(node.users):
            if user is not made[key] and (user not in dear or is_view(user)):
                user.replace_input_with(node, made[key])
    _clean(module)


def _dear(graph: torch.fx.Graph) -> dict[Node, Any]:
    """The constants that cost more to compute than to read, and what tells each from others."""
    found: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if traits(node.target).name in DEAR or any(one in found for one in node.all_input_nodes):
            key = constant_key(node)
            if key is not None and isinstance(node.meta.get("val"), torch.Tensor):
                found[node] = key
    return found


def _is_read(node: Node, dear: dict[Node, Any]) -> bool:
    """Whether others than constants read a value, or a view of it."""
    return any(user not in dear or (is_view(user) and _is_read(user, dear)) for user in node.users)


def added_to_inputs(module: torch.fx.GraphModule, count: int) -> None:
    """Add the first `count` results each to an input of its own, after all others: sums over blocks."""
    graph: Any = module.graph
    outs, sums = results(module), []
    last = graph.find_nodes(op="placeholder")[-1]
    for i, out in enumerate(outs[:count]):
        with graph.inserting_after(last):
            last = graph.placeholder(f"sum_before_{i}")
        value = out.meta["val"]
        last.meta["val"] = value.new_empty(value.shape)
        with graph.inserting_before(graph.output_node()):
            sums.append(graph.call_function(aten.add.Tensor, (last, out)))
        sums[-1].meta["val"] = last.meta["val"]
    graph.output_node().args = ([*sums, *outs[count:]],)
    _clean(module)


def _clean(module: torch.fx.GraphModule) -> None:
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
