"""Did the recomputation survive the compiler? Reading the graphs that `torch.compile` ends up with."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

from remat._core import warn_user
from remat._inspect import looked_at
from remat._torch import compiled_for_graphs
from remat.transforms import RematError, is_tensor, leaves_behind, tree_leaves
from remat.transforms.compat import OpOverload, example_of
from remat.transforms.compiled import RECOMPUTED

__all__ = ["assert_recomputed", "recomputed"]

Nodes = Iterable[torch.fx.Node]


class LostRecomputation(RematError, AssertionError):
    """A region's recomputation is not in the compiled graph."""


@dataclass(frozen=True)
class Taken:
    """A value that a recomputation starts from, kept since the forward or an input of the graph.

    Attributes:
        shape: sizes; symbolic ones where shapes are dynamic.
        dtype: element type.
        bytes: its size in bytes, that of the example where shapes are dynamic.
        op: the op that made it, or None for an input of the compiled function.

    Example:
        >>> import torch
        >>> from remat import remat
        >>> from remat.debug import recomputed
        >>> x = torch.ones(3, requires_grad=True)
        >>> (region,) = recomputed(remat(lambda x: x.sin().exp(), name="f"), x)
        >>> region.kept[0].shape, region.kept[0].bytes, region.kept[0].op
        ((3,), 12, None)
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype
    bytes: int
    op: str | None


@dataclass(frozen=True)
class Recomputed:
    """One call of a region in a compiled function.

    Attributes:
        region: the region's name.
        kept: what its recomputation starts from, inputs of the compiled function included.
        ops: how often each op is recomputed in the compiled graphs (views aside).
        lost: ops that were to be recomputed and are not: the compiler takes their results from the forward
            instead.

    Example:
        >>> import torch
        >>> from remat import remat
        >>> from remat.debug import recomputed
        >>> x = torch.ones(3, requires_grad=True)
        >>> (region,) = recomputed(remat(lambda x: x.sin().exp(), name="f"), x)
        >>> region.region, region.survived, sorted(region.ops)
        ('f', True, ['exp', 'sin'])
    """

    region: str
    kept: tuple[Taken, ...]
    ops: Counter[str]
    lost: Counter[str]

    @property
    def survived(self) -> bool:
        """Whether all that was to be recomputed is."""
        return not self.lost

    @property
    def bytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(taken.bytes for taken in self.kept)

    def __str__(self) -> str:
        ops = ", ".join(f"{n} {op}" for op, n in sorted(self.ops.items())) or "nothing"
        lost = f"; LOST: {', '.join(sorted(self.lost))}" if self.lost else ""
        return f"{self.region}: keeps {self.bytes} bytes in {len(self.kept)} values, recomputes {ops}{lost}"


def recomputed(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Recomputed]:
    """What each region of `fn` keeps and recomputes once `torch.compile` is through with it.

    Compiles `fn` by itself with Inductor's decompositions and partitioner, but generates no code. Then runs
    it once, with its backward if a result requires grad. Earlier compiled code is not touched.

    Args:
        fn: a function that `torch.compile` can compile, or the result of `torch.compile`; with `remat`
            regions inside, and torch.func transforms around them if any.
        args, kwargs: example arguments, as for a call.

    Returns:
        One entry for each call of a region that is differentiated, in the order in which they are recomputed.

    A region that lost its recomputation warns.

    Example:
        >>> import torch
        >>> from remat import remat
        >>> from remat.debug import recomputed
        >>> block = remat(lambda x, w: torch.tanh(x @ w).sin(), name="block")
        >>> x, w = torch.ones(2, 3), torch.ones(3, 3, requires_grad=True)
        >>> [region] = recomputed(lambda x, w: block(x, w).sum(), x, w)
        >>> region.survived, dict(region.ops)
        (True, {'mm': 1, 'tanh': 1})
    """
    wanted, found = RegionNodes(), RegionNodes()
    with looked_at(fn, args, kwargs, ops=False):
        _compile_and_run(fn, args, kwargs, wanted, found)
    regions = regions_in(wanted, found)
    for region in regions:
        if not region.survived:
            warn_user(_lost(region))
    return regions


def regions_in(wanted: RegionNodes, found: RegionNodes) -> list[Recomputed]:
    """What became of the recomputations `wanted`, where `found` is what a compiler has in the end."""
    regions = [_read(key, wanted.nodes[key], found) for key in wanted.nodes]
    return [region for region in regions if region.kept or region.lost]


def assert_recomputed(
    fn: Callable[..., Any], /, *args: Any, ops: Iterable[str] = (), **kwargs: Any
) -> list[Recomputed]:
    """Raise unless every region of `fn` is recomputed when compiled; for your own tests.

    Args:
        fn, args, kwargs: as for `recomputed`, whose result is returned.
        ops: names of ops, such as `"mm"`, that must be among those recomputed.

    Raises:
        RematError: (also an `AssertionError`) a region lost its recomputation, none is recomputed at all,
            or an op of `ops` is not.

    Example:
        >>> import torch
        >>> from remat import remat
        >>> from remat.debug import assert_recomputed
        >>> f = torch.func.grad(lambda x: remat(torch.sin, name="sine")(x).sum())
        >>> print(*assert_recomputed(f, torch.ones(3)))
        sine: keeps 12 bytes in 1 values, recomputes nothing
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        regions = recomputed(fn, *args, **kwargs)
    for region in regions:
        if not region.survived:
            raise LostRecomputation(_lost(region))
    done = sum((region.ops for region in regions), Counter())
    if not regions or not set(ops) <= set(done):
        raise LostRecomputation(
            f"expected {', '.join(ops) or 'some op'} to be recomputed; recomputed are "
            f"{', '.join(sorted(done)) or 'no ops'}. Is the function differentiated, and does the region "
            "hold ops whose results the backward reads?"
        )
    return regions


def _lost(region: Recomputed) -> str:
    return (
        f"region {region.region!r} lost its recomputation to the compiler: the results of "
        f"{', '.join(sorted(region.lost))} are kept from the forward until the backward. A custom graph pass "
        "that removes `torch.ops.remat.fence` does this; otherwise please report it, with the versions of "
        "torch and remat."
    )


class RegionNodes:
    """Nodes of graphs by the call of a region that they recompute."""

    def __init__(self) -> None:
        self.nodes: dict[str, list[torch.fx.Node]] = {}
        # Those whose values nothing reads: of its input the backward of a pooling reads the shape alone.
        self.unread: dict[str, list[torch.fx.Node]] = {}
        # What computes the value of a name: a backward gets values under these names.
        self.makers: dict[str, str] = {}

    def add(self, nodes: Nodes) -> None:
        """Take note of the nodes of a graph."""
        for node in nodes:
            if node.op == "call_function":
                self._note_maker(node)
            if key := _region_of(node):
                self.nodes.setdefault(key, []).append(node)

    def add_unread(self, nodes: Nodes) -> None:
        """Take note of nodes that a graph has, and its code does not compute."""
        for node in nodes:
            if key := _region_of(node):
                self.unread.setdefault(key, []).append(node)

    def _note_maker(self, node: torch.fx.Node) -> None:
        if node.target in _FREE:
            source = node.all_input_nodes[0].name
            if source in self.makers:
                self.makers[node.name] = self.makers[source]
        else:
            self.makers[node.name] = str(node.target)


def _region_of(node: torch.fx.Node) -> str | None:
    """The call of a region that a node recomputes."""
    return node.meta.get("custom", {}).get(RECOMPUTED) if node.op == "call_function" else None


def uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.compile` was given to make `fn`; `fn` itself if it is none of its results."""
    return getattr(fn, "_torchdynamo_orig_callable", getattr(fn, "_orig_mod", fn))


def _compile_and_run(fn: Any, args: Any, kwargs: Any, wanted: RegionNodes, found: RegionNodes) -> None:
    out = compiled_for_graphs(
        uncompiled(fn), lambda m: wanted.add(m.graph.nodes), lambda m: found.add(m.graph.nodes)
    )(*args, **kwargs)
    ends = [t for t in tree_leaves(out) if is_tensor(t) and t.requires_grad]
    if ends:
        torch.autograd.grad(ends, leaves_behind(ends), [torch.ones_like(t) for t in ends], allow_unused=True)


def _read(key: str, wanted: Nodes, graphs: RegionNodes) -> Recomputed:
    found = graphs.nodes.get(key, [])
    ops = _ops(found)
    lost = _distinct(wanted) - ops - _ops(graphs.unread.get(key, ()))
    return Recomputed(key.partition(" ")[2], _kept(found, graphs.makers), ops, lost)


def _kept(found: Nodes, makers: dict[str, str]) -> tuple[Taken, ...]:
    """What the recomputation takes from outside: through fences, and beside what is behind one."""
    inside = set(found)
    fences = [node for node in found if node.target is torch.ops.remat.fence.default]
    taken = {fence: cast(torch.fx.Node, fence.args[0]) for fence in fences}
    known = {_base(source) for source in taken.values()}
    for node in found:
        for source in () if node in taken else node.all_input_nodes:
            base = _base(source)
            if base in inside or base in known or not is_tensor(base.meta.get("val")):
                continue
            known.add(base)
            if _reads_input(base):
                taken[base] = base
    return tuple(_taken(node, source, makers) for node, source in taken.items())


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """What `node` is a view of; itself if it is none."""
    while isinstance(node.target, OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _ops(nodes: Nodes) -> Counter[str]:
    return Counter(name for node in nodes if (name := _name(node)))


def _name(node: torch.fx.Node) -> str:
    """The op that a node computes, empty for views, fences and the like."""
    op = node.target
    if op is torch.ops.higher_order.flex_attention:
        return "flex_attention"
    if not isinstance(op, OpOverload) or op.namespace == "remat" or op.is_view:
        return ""
    return "" if op in _FREE else op._schema.name.rpartition("::")[2]


# Another name for the same value.
_NAMES_ALONE = {torch.ops.aten.alias.default, torch.ops.aten.detach.default}
_FREE = _NAMES_ALONE | {
    torch.ops.aten.clone.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.remat.once.default,
}


def _distinct(nodes: Nodes) -> Counter[str]:
    """The ops among `nodes` that differ in op or operands and that read an input of the graph: a compiler
    may compute the others once."""
    seen: dict[Any, torch.fx.Node] = {}
    same: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in nodes:
        given = torch.fx.map_arg((node.args, node.kwargs), lambda n: same.get(n, n))
        if node.target in _NAMES_ALONE:
            (read,) = node.all_input_nodes
            same[node] = same.get(read, read)
            continue
        same[node] = seen.setdefault((node.target, repr(given)), node)
    return _ops(node for node in seen.values() if _reads_input(node))


def _reads_input(node: torch.fx.Node) -> bool:
    stack, seen = [node], {node}
    while stack:
        at = stack.pop()
        if at.op == "placeholder":
            return True
        stack.extend(n for n in at.all_input_nodes if n not in seen)
        seen.update(at.all_input_nodes)
    return False


def _taken(node: torch.fx.Node, source: torch.fx.Node, makers: dict[str, str]) -> Taken:
    value = node.meta["val"]
    size = example_of(value.untyped_storage().nbytes())
    return Taken(tuple(value.shape), value.dtype, size, makers.get(source.name))
