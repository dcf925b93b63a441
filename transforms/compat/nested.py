"""Private names of torch's operator on a subgraph, which Inductor lowers once for all of its calls.

`torch.compiler.nested_compile_region` marks a function for it, and Dynamo writes a call of the operator. Ours
begin where regions are written out, below autograd, so torch's own rules for forward and backward of such
calls have no part in them. Kernels do not fuse across calls, so only what the user has marked is called;
other regions that are alike are copied. Tried on 2.13.0 (CPU).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from remat.transforms.compat.aot import at_work

try:
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph as SUBGRAPH_CALL
except ImportError:
    SUBGRAPH_CALL: Any = None


def is_inductor(compiler: Any) -> bool:
    """Whether a backend is Inductor."""
    name = getattr(compiler, "__name__", ""), getattr(compiler, "__module__", "")
    known = ("inductor", "torch._dynamo.backends.inductor")
    return isinstance(compiler, torch._TorchCompileInductorWrapper) or name == known


def lowered_once() -> bool:
    """Whether what is traced now goes to a compiler that lowers a subgraph once for all of its calls.

    Inductor's C++ wrapper knows no such calls, and nobody has tried them in CUDA graphs.
    """
    if SUBGRAPH_CALL is None or not is_inductor(at_work()):
        return False
    from torch._inductor import config

    return not (config.cpp_wrapper or in_cuda_graphs())


def in_cuda_graphs() -> bool:
    """Whether what is traced now runs in CUDA graphs, whose results the next run may overwrite."""
    if not is_inductor(at_work()):
        return False
    from torch._inductor import config

    return config.triton.cudagraphs


# -- calls that the user has marked ------------------------------------------------------------------------


def unmarked(fn: Any) -> Any | None:
    """The function that `torch.compiler.nested_compile_region` has marked; None where it has marked nothing.

    Dynamo knows marked functions outside of torch.func's transforms only, and takes longer for them.
    """
    found = None
    # A wrapper that copies a marked function's attributes does more than that one.
    while getattr(fn, "__globals__", {}).get("__name__") == "torch._higher_order_ops.invoke_subgraph":
        inner = getattr(fn, "__marked_compile_region_fn__", None)
        if inner is None:
            break
        fn = found = inner
    return found


def written_in(module: GraphModule) -> GraphModule:
    """A graph of Dynamo's with all calls of subgraphs written in."""
    graph, attributes = Graph(), dict[str, Any]()
    given = []
    for node in module.graph.find_nodes(op="placeholder"):
        given.append(graph.node_copy(node))
    graph.output(_write(module, given, graph, attributes))
    made = GraphModule(attributes, graph)
    made.meta = dict(module.meta)
    return made


def _write(module: GraphModule, given: Sequence[Any], graph: Graph, attributes: dict[str, Any]) -> Any:
    """Add a graph's nodes to another one, without placeholders and output; what it returns, there."""
    at: dict[Node, Any] = dict(zip(module.graph.find_nodes(op="placeholder"), given, strict=True))
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op in ("get_attr", "call_module"):
            if all(user.target is SUBGRAPH_CALL and user.args[0] is node for user in node.users):
                continue
            value = operator.attrgetter(node.target)(module)
            # One body may be written in several times, and two bodies have attributes of one name.
            at[node] = copy = graph.node_copy(node, at.__getitem__)
            copy.target = next((k for k, v in attributes.items() if v is value), f"inner_{len(attributes)}")
            attributes[copy.target] = value
        elif node.target is SUBGRAPH_CALL:
            body: Any = operator.attrgetter(node.args[0].target)(module)
            operands = [at[x] if isinstance(x, Node) else x for x in node.args[2:]]
            at[node] = _write(body, operands, graph, attributes)
        elif node.target is operator.getitem and not isinstance(at[node.args[0]], Node):
            at[node] = at[node.args[0]][node.args[1]]
        else:
            at[node] = graph.node_copy(node, at.__getitem__)
    return map_arg(module.graph.output_node().args[0], at.__getitem__)


# -- calls of our own ----------------------------------------------------------------------------------------


@dataclass
class Subgraph:
    """A stretch of a graph as a graph of its own.

    Attributes:
        name: under which the graph around it knows it.
        given: the nodes that it reads there.
    """

    name: str
    given: list[Node]

    def called(self, tracer: Any, node_of: dict[Node, Node], meta: dict[str, Any]) -> Iterator[Node]:
        """Add a call; its results, with what they stand for as `meta["val"]`. It is given what `node_of`
        has in the places of `given`."""
        # Each call has a node of its own for the subgraph. So no two are the same to who looks for common
        # subexpressions, and each draws its own random numbers.
        subgraph = tracer.graph.create_node("get_attr", self.name)
        args = subgraph, self.name, *[node_of[node] for node in self.given]
        call = tracer.graph.create_node("call_function", SUBGRAPH_CALL, args, {})
        call.meta = dict(meta)
        for i, value in enumerate(meta["val"]):
            result = tracer.graph.create_node("call_function", operator.getitem, (call, i), {})
            result.meta = meta | {"val": value}
            yield result


def as_subgraph(
    tracer: Any, nodes: Sequence[Node], given: Sequence[Node], ends: Sequence[Node]
) -> Subgraph | None:
    """What leads from `given` to `ends`, known to the graph that is being traced; None where a result shares
    memory. Outside nobody would know of memory that results share, with each other or with operands.
    """
    made = [_storage(node) for node in ends]
    if len(set(made)) < len(made) or not set(made).isdisjoint(map(_storage, given)):
        return None
    # An operand lives until the call.
    read = {node for reader in nodes for node in reader.all_input_nodes}
    given = [node for node in given if node in read]
    graph = Graph()
    at: dict[Node, Node] = {}
    for i, node in enumerate(given):
        at[node] = graph.placeholder(f"given_{i}")
        at[node].meta = {"val": node.meta["val"]}
    for node in nodes:
        at[node] = graph.node_copy(node, at.__getitem__)
    graph.output(tuple([at[node] for node in ends]))
    name = tracer.get_fresh_qualname("remat_region_")
    tracer.root.add_module(name, GraphModule({}, graph))
    return Subgraph(name, given)


def _storage(node: Node) -> int:
    return node.meta["val"].untyped_storage()._cdata
