"""Private names of torch's tracer (make_fx); `autograd.py` has the others.

A stretch of the graph that is being traced can be called for other operands. That takes a fraction of the
time of tracing it again. Tried on 2.11.0, 2.13.0 and 2.15.0 (CPU).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.utils._pytree import tree_leaves

from remat.transforms.compat.aot import at_work
from remat.transforms.compat.modes import active_modes

Tensors = Sequence[torch.Tensor]
_aten = torch.ops.aten
# Views that count from where the memory begins, or in elements that are larger than their operand's.
_UNMOVABLE = {
    _aten.as_strided.default,
    _aten.as_strided_copy.default,
    _aten.as_strided_scatter.default,
    _aten.view.dtype,
    _aten.view_as_complex.default,
}
# Where a node came from, which a copy of it did not: modules of another layer, other nodes of autograd.
_PROVENANCE = ("nn_module_stack", "fwd_nn_module_stack", "fwd_source_fn_stack", "from_node", "seq_nr")


def tracer_at_work() -> Any | None:
    """The tracer that writes down what runs now, functionalized and on fake tensors; None if there is none,
    or if somebody else watches the ops too, or marks them."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx import traceback
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode

    mode = get_proxy_mode()
    if mode is None or "recompute" in traceback.current_meta:
        return None
    usual = {FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode}
    return mode.tracer if {type(m) for m in active_modes()} <= usual else None


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a value of the graph, which nothing that is written to it later changes."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    functional = type(tensor) is FunctionalTensor
    return FunctionalTensor.to_functional(tensor.from_functional()) if functional else tensor.detach()


def must_save(tensor: torch.Tensor) -> None:
    """Keep the partitioner from computing this value of the graph again in the backward.

    It takes the memory of an argument for what it was, also where the forward has written to it since."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.utils.checkpoint import CheckpointPolicy

    mode = get_proxy_mode()
    if mode is not None and (tracked := _tracked(mode.tracer, tensor)) is not None:
        tracked.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def described(tensors: Tensors) -> tuple[Any, ...] | None:
    """What the tracer's nodes depend on in these tensors; None where they are of an unusual kind, have sizes
    that are not known yet, or share memory."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    found = []
    for tensor in tensors:
        if type(tensor) is not FunctionalTensor or tensor.layout is not torch.strided:
            return None
        if not all(type(n) is int for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset())):
            return None
        found.append(
            (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
        )
    return tuple(found)


def _tracked(tracer: Any, tensor: Any) -> Node | None:
    """The node of a trace that a tensor is."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    fake = tensor.from_functional() if hasattr(tensor, "from_functional") else tensor
    slot: Any = get_proxy_slot(fake, tracer, None) if type(fake) is FakeTensor else None
    return None if slot is None else slot.proxy.node


def traced(tensor: torch.Tensor) -> tuple[Any, Node] | None:
    """The tracer at work and the node of a functionalized tensor; None outside of such a trace."""
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode() if type(tensor) is FunctionalTensor else None
    tracked = None if mode is None else _tracked(mode.tracer, tensor)
    return None if mode is None or tracked is None else (mode.tracer, tracked)


def nodes_of(tensors: Iterable[torch.Tensor]) -> list[Node | None]:
    """The nodes of these tensors in the graph that is being traced."""
    found = [traced(t) for t in tensors]
    return [None if at is None else at[1] for at in found]


def last_node(tracer: Any) -> Node:
    """What the tracer has added last."""
    return next(iter(reversed(tracer.graph.nodes)))


class NodeSpan:
    """The nodes that a tracer adds from the making of this on."""

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer
        self.before = last_node(tracer)

    def nodes(self) -> Iterator[Node]:
        node = self.before.next
        while node.op != "root":
            yield node
            node = node.next

    def cut(self, inputs: Tensors, outputs: Tensors, shared: Any) -> Template | None:
        """What leads from `inputs` to `outputs`, to be called for others; None where a call would not do the
        same, or nobody outside would know of memory that results share, with each other or with operands.

        Calls read the results of the op `shared`, wherever they were made, as they are.
        """
        given: list[Any] = [_tracked(self.tracer, t) for t in inputs]
        ends: list[Any] = [_tracked(self.tracer, t) for t in outputs]
        new = dict.fromkeys(self.nodes())
        if None in given or None in ends or len(set(given)) < len(given) or not all(map(is_pure_node, new)):
            return None
        starts = dict.fromkeys(given)
        wanted: set[Node] = set()
        stack = list(ends)
        while stack:
            node = stack.pop()
            if node.target is shared:
                starts.setdefault(node)
            if node in starts or node in wanted:
                continue
            if node not in new:
                return None
            wanted.add(node)
            stack.extend(node.all_input_nodes)
        made = list(map(_storage, ends))
        if len(set(made)) < len(made) or not set(made).isdisjoint(map(_storage, starts)):
            return None
        return Template([node for node in new if node in wanted], list(starts), ends)


def is_pure_node(node: Node) -> bool:
    """Whether a node writes to nothing and makes fake strided tensors only; a copy does the same."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    if target._schema.is_mutable or target in _UNMOVABLE:
        return False
    made = node.meta.get("val")
    if isinstance(made, torch.Tensor):
        return _is_fake(made)
    return all(value is None or _is_fake(value) for value in tree_leaves(made))


def _is_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return type(value) is FakeTensor and value.layout is torch.strided


def _storage(node: Node) -> int:
    return node.meta["val"].untyped_storage()._cdata


@dataclass
class Template:
    """A stretch of a graph, as a function of some of the tensors that it reads.

    Attributes:
        nodes: those that lead to `ends`, in their order.
        starts: the nodes it reads: first its inputs, then those that are the same for every call.
        ends: the nodes of its results.
        subgraph: the same as a graph of its own, once there is one.
    """

    nodes: list[Node]
    starts: list[Node]
    ends: list[Node]
    subgraph: Subgraph | None = None

    def paste(self, tracer: Any, inputs: Tensors, tags: dict[str, Any]) -> Tensors | None:
        """The results of a call for other inputs, of the same description, which bears `tags`; None, and
        nothing was added, where the tracer does not know them."""
        from torch._subclasses.functional_tensor import FunctionalTensor
        from torch.fx import Proxy
        from torch.fx.experimental.proxy_tensor import track_tensor
        from torch.fx.proxy import _get_seq_nr
        from torch.utils._python_dispatch import _disable_current_modes

        given: list[Any] = [_tracked(tracer, t) for t in inputs]
        if None in given:
            return None
        self.subgraph = self.subgraph or as_subgraph(tracer, self.nodes, self.starts, self.ends)
        node_of = dict(zip(self.starts, [*given, *self.starts[len(given) :]], strict=True))
        meta = {k: v for k, v in self.ends[-1].meta.items() if k not in _PROVENANCE}
        meta["seq_nr"] = _get_seq_nr()
        # Its first ops recompute, its last ones may be the backward's.
        meta["custom"] = meta.get("custom", {}) | tags
        results: list[Any] = []
        with _disable_current_modes():
            meta["val"] = tuple([_another(node.meta["val"]) for node in self.ends])
            for node in self.subgraph.called(tracer, node_of, meta):
                results.append(node.meta["val"])
                track_tensor(results[-1], Proxy(node, tracer), constant=None, tracer=tracer)
        return [FunctionalTensor.to_functional(fake) for fake in results]


def _another(fake: Any) -> Any:
    """A fake tensor like another, in memory of its own."""
    from torch._subclasses.fake_tensor import FakeTensor

    memory = torch.UntypedStorage(fake.untyped_storage().nbytes(), device="meta")
    elem = torch.empty(0, dtype=fake.dtype, device="meta")
    elem.set_(memory, fake.storage_offset(), fake.shape, fake.stride())
    return FakeTensor(fake.fake_mode, elem, fake.device)


def tags() -> dict[str, Any]:
    """What the nodes that a trace makes now bear in their `meta["custom"]`."""
    from torch.fx import traceback

    return dict(traceback.current_meta.get("custom", {}))


def tagged(tags: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Within, nodes also bear these in their `meta["custom"]`."""
    from torch.fx.traceback import annotate

    return annotate(tags) if tags else contextlib.nullcontext()


# -- torch's operator on a subgraph ------------------------------------------------------------------------


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
    while (
        getattr(fn, "__globals__", {}).get("__name__") == "torch._higher_order_ops.invoke_subgraph"
        and (inner := getattr(fn, "__marked_compile_region_fn__", None)) is not None
    ):
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

    Inductor lowers it once for all of its calls. `torch.compiler.nested_compile_region` marks a function for
    it, and Dynamo writes a call of the operator. Ours begin where regions are written out, below autograd, so
    torch's own rules for forward and backward of such calls have no part in them. Kernels do not fuse across
    calls, so only what the user has marked is called. Tried on 2.13.0 (CPU).

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


def as_subgraph(tracer: Any, nodes: Sequence[Node], given: Sequence[Node], ends: Sequence[Node]) -> Subgraph:
    """What leads from `given` to `ends`, known to the graph that is being traced."""
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
