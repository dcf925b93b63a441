"""Regions inside graphs that are being traced for a compiler.

Dynamo sees a region as one call of `torch`'s wrapper operator. It traces the user's function into a graph
module, with captured tensors as operands, and leaves the rest to us. When the graph is then traced below
autograd, `run_graph` calls the region's primitive (`functorch`) there and then,
under whatever functorch levels are active: the recomputation is written out in the graph. A fence on all that
the recomputation reads keeps the compiler from undoing it.

Here, unlike in eager, nothing has to be skipped, freed or put back: what nobody reads is dead code that the
compiler drops.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat.transforms.compat import (
    SUBGRAPH_CALL,
    compiler as aot_compiler,
    depth,
    drop_guards,
    in_transform,
    is_tracing,
    level_argument,
    tagged,
    tags,
    teach_inductor,
    traced_as_it_runs,
    unwind_levels,
    written_in,
)
from remat.transforms.compiled import CAPTURED, NAMED, GraphDedup, GraphLowering, dedup_key
from remat.transforms.context import active, untracked
from remat.transforms.entry.dispatch import outermost, run
from remat.transforms.functorch import Aliasing, Family, Prim, call
from remat.transforms.intermediates import Handed, current, tap
from remat.transforms.region import Region
from remat.transforms.state import Ambient, device_kinds

_local = threading.local()


def outermost_traced() -> bool:
    """Whether no other region is being run around here."""
    return not getattr(_local, "depth", 0) and outermost()


def run_graph(region: Region, graph: Graph, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Call a region whose function is `graph`."""
    outs = _run(region, graph, operands)
    # Dynamo takes a result that is an argument for the argument itself from then on, also where that is what
    # one differentiates by.
    return tuple([out if i is None else operands[i] for out, i in zip(outs, graph.returned, strict=True)])


# Torch traces such a function's backward before it is functionalized.
_UNDONE = (
    "The region {!r} is part of a function that torch.compiler.nested_compile_region marks. Torch "
    "differentiates that function as a whole and undoes the recomputation, so the region saves no memory. "
    "Mark the region's own function: remat(torch.compiler.nested_compile_region(fn))."
)


def _run(region: Region, graph: Graph, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    if not is_tracing() or active.transparent:
        if traced_as_it_runs() and aot_compiler() is not None:
            warnings.warn(_UNDONE.format(region.name), stacklevel=2)
        # A backend that executes Dynamo's graph as it is, such as "eager".
        return run(region, operands, {})
    _local.depth = getattr(_local, "depth", 0) + 1
    # Of its first fake tensor alone torch knows the number.
    operands = tuple([_number(t) if i in graph.numbers else t for i, t in enumerate(operands)])
    try:
        if "torch._inductor.compile_fx" in sys.modules:
            teach_inductor()  # how to compile our ops, as Inductor may be what will compile them
        if not torch.is_grad_enabled() and not in_transform():
            return region.function(*operands)
        return _TracedCall(region, graph, operands)()
    finally:
        _local.depth -= 1


@dataclass(frozen=True)
class Given:
    """What a region was called with, in numbers.

    Dynamo makes flat operands of arguments and captured tensors: arguments that are tensors themselves come
    first, and repeated and unused ones are left out.

    Attributes:
        tensors: how many arguments are tensors, `nn.Parameter` aside.
        containers: whether some arguments hold others.
    """

    tensors: int
    containers: bool

    def held(self, examples: Sequence[Any]) -> Iterator[int]:
        """Which operands somebody else holds, given an example of each: what is found in eager."""
        left = self.tensors
        for i, example in enumerate(examples):
            if isinstance(example, torch.nn.Parameter):
                yield i
            elif isinstance(example, torch.Tensor):
                left -= 1
                if left < 0 and (not self.containers or _leaf(example)):
                    yield i


def _leaf(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and (tensor.is_leaf or in_transform())


class Graph:
    """A function that Dynamo traced, as a function of flat operands.

    Where it uses torch.func inside, Dynamo has written down the numbers of the levels that were entered;
    the function runs again below and above other levels, so the numbers are shifted.

    Attributes:
        held: positions of operands that somebody else holds, as `joint.graph` asks for them.
        numbers: positions of operands that are numbers to the function: Dynamo makes tensors of floats.
        once: whether a compiler is to lower it once for all of its calls. Somebody says so who has marked
            what it calls with `torch.compiler.nested_compile_region`.
    """

    def __init__(self, module: torch.fx.GraphModule, given: Given | None = None, once: bool = False) -> None:
        calls = module.graph.find_nodes(op="call_function", target=SUBGRAPH_CALL)
        self.once = once or bool(calls)
        self.module = module = written_in(module) if calls else module
        self.given = given
        placeholders = module.graph.find_nodes(op="placeholder")
        self.held = frozenset(
            given.held([n.meta.get("example_value") for n in placeholders]) if given else ()
        )
        # How deep the levels were where Dynamo traced the region's call.
        traced = getattr(_local, "traced_depth", None)
        self.depth: int = depth() if traced is None else traced
        inputs = {node: i for i, node in enumerate(placeholders)}
        self.constants: dict[int, float] = {}
        self.numbers = {i for node, i in inputs.items() if _is_number(module, node)}
        results: Any = module.graph.output_node().args[0]
        self.returned: list[int | None] = [inputs.get(node) for node in results]
        # Names, and examples, of the values among its results that a capture around it wants.
        self.named: list[tuple[str, torch.Tensor]] = [
            (node.args[1], node.meta["example_value"])
            for node in results
            if getattr(node, "target", None) is CAPTURED
        ]

    def bare(self) -> Graph:
        """The function without what a capture wants of it."""
        if not self.named:
            return self
        copy = torch.fx.Graph()
        results: Any = copy.graph_copy(self.module.graph, {})
        copy.output(tuple([node for node in results if getattr(node, "target", None) is not CAPTURED]))
        for node in reversed(copy.find_nodes(op="call_function", target=CAPTURED)):
            copy.erase_node(node)
        return Graph(torch.fx.GraphModule(self.module, copy), self.given, self.once)

    def fix(self, operands: Sequence[Any]) -> None:
        """Take the numbers that it is given for constants, which guards then hold."""
        numbers = {i: _number(x) if i in self.numbers else x for i, x in enumerate(operands)}
        self.constants = {i: float(x) for i, x in numbers.items() if isinstance(x, (float, torch.SymFloat))}

    def without_data(self, operands: Sequence[Any]) -> list[Any]:
        """Operands for a look at the function: which number it is given matters to no shape."""
        return [
            1.0 if i in self.numbers and isinstance(x, torch.Tensor) else x for i, x in enumerate(operands)
        ]

    def __call__(self, *operands: Any) -> Any:
        given = [self.constants.get(i, x) for i, x in enumerate(operands)] if self.constants else operands
        before = depth()
        try:
            return _Interpreter(self.module, self.depth).run(*given)
        except BaseException as error:
            drop_guards(error)
            unwind_levels(to=before)
            raise


def _number(operand: Any) -> Any:
    return operand.item() if isinstance(operand, torch.Tensor) else operand


def _is_number(module: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Whether nothing but the number in a tensor is read, by regions inside neither."""
    if node.op != "placeholder" or not isinstance(node.meta.get("example_value"), torch.Tensor):
        return False

    def reads(user: torch.fx.Node) -> bool:
        inner = (
            getattr(module, str(getattr(user.args[1], "target", "")), None) if len(user.args) > 1 else None
        )
        if not isinstance(inner, torch.fx.GraphModule):
            return user.op == "call_method" and user.target == "item"
        places = zip(user.args[2:], inner.graph.find_nodes(op="placeholder"), strict=False)
        # torch.cond and the like are given their operands in a tuple.
        met = [place for given, place in places if given is node]
        return bool(met) and all(_is_number(inner, place) for place in met)

    return bool(node.users) and all(map(reads, node.users))


class _Interpreter(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule, traced_depth: int) -> None:
        super().__init__(module)
        self.traced = traced_depth
        self.shift = depth() - traced_depth
        # Every node brings its own; what the nodes made here are tagged with comes on top.
        self.tags = tags()

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "item" and not isinstance(args[0], torch.Tensor):
            return args[0]  # see `Graph.numbers`
        with tagged(self.tags):
            return super().call_method(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        at = level_argument(target)
        if at is not None and args[at] > self.traced:
            args = (*args[:at], args[at] + self.shift, *args[at + 1 :])
        before = getattr(_local, "traced_depth", None)
        # For regions inside this one.
        _local.traced_depth = depth() - self.shift
        try:
            with tagged(self.tags):
                out = super().call_function(target, args, kwargs)
                return tap(args[1], out, graph=True) if target is NAMED else out
        finally:
            _local.traced_depth = before


class _TracedCall:
    """One call of a region in a graph that is being traced."""

    def __init__(self, region: Region, graph: Graph, operands: tuple[Any, ...]) -> None:
        self.region = region
        self.operands = list(operands)
        self.at = [i for i, x in enumerate(self.operands) if isinstance(x, torch.Tensor)]
        self.tensors = [self.operands[i] for i in self.at]
        self.taps = Handed(graph.named) if active.sessions and current() else None
        self.outs: list[Any] = []
        self.aliasing = Aliasing()
        ambient = Ambient(device_kinds(self.tensors))
        # What runs in another region is that one's to record; captures count what they are given.
        alone = _local.depth == 1 and self.taps is None
        like = dedup_key(region, operands, ambient) if alone and region.function.once else None
        dedup = GraphDedup(like, self.outs, _TENSOR)
        self.family = Family(region, ambient, GraphLowering(region, dedup))

    def __call__(self) -> tuple[Any, ...]:
        operands = [*self.tensors, *(self.taps.offsets if self.taps else ())]
        made = call(Prim(self.body, self.family), operands)
        # A recomputation around is handed values apart that shared memory: it makes fewer views, or none.
        results = iter(untracked(self.aliasing.rebuilt, made, operands))
        return tuple([next(results) if out is _TENSOR else out for out in self.outs])

    def body(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors, offsets = operands[: len(self.at)], operands[len(self.at) :]
        with self.taps.opened(offsets) if self.taps else contextlib.nullcontext():
            given = dict(zip(self.at, tensors, strict=True))
            outs = self.region.function(*[given.get(i, x) for i, x in enumerate(self.operands)])
        self.outs[:] = [_TENSOR if isinstance(out, torch.Tensor) else out for out in outs]
        found = [out for out in outs if isinstance(out, torch.Tensor)]
        return self.aliasing.leaving(found, operands)


_TENSOR = object()
