"""How a region's primitives run when they are written out in a graph that is being traced.

Recording and replaying are those of eager, made simple: what nobody reads is dead code that the compiler
drops, so nothing is skipped or freed here. Values that the selector keeps stay values of the graph.
Everything that a recomputation starts from passes a fence (`compiled.barrier` says what that is).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from remat.transforms.compat import (
    NodeSpan,
    OpOverload,
    as_it_is,
    example_bytes,
    graph_memory,
    graph_storage,
    graph_task,
    is_pure_node,
    last_node,
    nodes_of,
    tagged,
    traced,
    tracer_at_work,
    unwrapped,
)
from remat.transforms.compiled.barrier import (
    ARRIVED,
    FENCE,
    ONCE,
    behind,
    fence,
    snapshot,
)
from remat.transforms.compiled.record import UNKNOWN, GraphDedup, GraphRecord, GraphReplay, plain
from remat.transforms.context import ranks_met, recordings, untracked
from remat.transforms.errors import RematError
from remat.transforms.functorch import Prim, PullBack, replaying
from remat.transforms.ops import Traits, tensors_in, traits
from remat.transforms.region import Region

Tensors = Sequence[torch.Tensor]
_serials = itertools.count()


class GraphLowering:
    """Runs primitives at the bottom of the functorch levels (a `functorch.World`).

    Args:
        region: whose primitives.
        alike: how to copy others of the graph, or to be copied.
    """

    def __init__(self, region: Region, alike: GraphDedup | None = None) -> None:
        self.tags = {RECOMPUTED: f"{next(_serials)} {region.name}"}
        self.alike = alike or GraphDedup()

    def forward(self, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
        """Run a region; with a node above it that will pull back, note what its recomputation needs."""
        if not prim.residual_slots:
            return tuple(prim.body(*operands))
        run = functools.partial(self._forward, prim, operands)
        record, outs = run() if prim.mapped else self.alike.forward(operands, prim.masks, run)
        for slot in prim.residual_slots:
            slot.written = record
        given_to(operands)
        if outs and (sent := [host for value in record.sent() for host in value.hosts()]):
            outs = [untracked(behind, outs[0], sent), *outs[1:]]
        if copies := list(record.before.values()):
            # A partitioner computes in the backward what no result of the forward needs. There the memory
            # that a copy was made of has been written to, here or by what comes after the region.
            free = [t.is_floating_point() and graph_storage(t) not in record.given for t in outs]
            outs = [untracked(behind, t, copies) if own else t for t, own in zip(outs, free, strict=True)]
        # Autograd sees the node make them. AOTAutograd would see how functionalization came to them, views
        # and detached values, and make them so once more, without the node.
        memory = [graph_storage(t) for t in outs]
        alone = [memory.count(m) == 1 and m not in record.given for m in memory]
        made = tuple([as_it_is(t) if own else t for t, own in zip(outs, alone, strict=True)])
        record.results = nodes_of(made)
        for around in recordings():
            if isinstance(around, GraphRecord):
                around.origins.renamed(outs, made)
        return made

    @staticmethod
    def _forward(prim: Prim, operands: Tensors) -> tuple[GraphRecord, Tensors]:
        region = prim.family.region
        record = GraphRecord(region, operands, GraphConstants(region.shares, operands))
        selector = record.selector
        record.tape.loose = prim.dual
        graded = [t.requires_grad for t in operands]
        with selector.watching(levels=True) if selector else contextlib.nullcontext(), record:
            try:
                outs = (prim.recorded or prim.body)(*operands)
            except RuntimeError as error:
                if "leaf Variable that requires grad" not in str(error):
                    raise
                raise RematError(record.refusal("an op", f"through which gradients flow: {error}")) from error
        if selector:
            selector.finished(record.tape)
        record.finished(graded)
        if region.ranks is not None and ranks_met():
            region.ranks.compare_traced(region, record)
        # Of what others have, too, the caller gets a copy.
        shares = record.constants.shares
        return record, [untracked(snapshot, t) if shares(t) else t for t in outs]

    def pull(self, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
        """Recompute a region behind a fence, and pull its cotangents back."""
        body = prim.body
        assert prim.source is not None
        record: GraphRecord = prim.source.written
        turn = Turn(operands, *prim.cotangents)
        operands = turn.operands
        # The pull-back of a pull-back has more operands than the forward, and other results.
        first = isinstance(body, PullBack) and body.count == len(record.operands)
        plain = first and prim.recorded is None and not record.rewritten
        if plain and (late := turn.late_readers(record.results)):
            made, turn.moved = self._early(prim, turn, late), late.moved
        else:
            run = functools.partial(self._pull, prim, operands)
            if isinstance(body, PullBack) and first and not prim.mapped:
                made = tuple(self.alike.pull(operands, record, body, self.tags, run))
            else:
                made = run()
        if isinstance(body, PullBack) and plain:
            made = isolate_shared_gradients(made, [record.operands[i] for i in body.mask])
        turn.done(made, [value.fetched for value in record.sent() if value.fetched is not None])
        return made

    def _early(self, prim: Prim, turn: Turn, late: Late) -> tuple[torch.Tensor, ...]:
        """`_pull` for a region whose results others read in the backward before its cotangents are there."""
        outs: list[torch.Tensor] = []

        def seen(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs[:] = made = body.body(*operands)
            return made

        body: Any = prim.body
        prim = replace(prim, body=replace(body, body=seen))
        made = self._pull(prim, turn.operands, [late.after])
        late.read_again(outs)
        return made

    def _pull(self, prim: Prim, operands: Tensors, after: Tensors | None = None) -> tuple[torch.Tensor, ...]:
        first, last = prim.cotangents
        after = operands[first:last] if after is None else after
        assert prim.source is not None
        record: GraphRecord = prim.source.written
        region, ambient = prim.family.region, prim.family.ambient
        with contextlib.ExitStack() as stack:
            tag = stack.enter_context(contextlib.ExitStack())
            tag.enter_context(tagged(self.tags))
            before = record.before
            fenced = [
                t if first <= i < last or record.origins.bare(i) else fence(before.get(i, t), after)
                for i, t in enumerate(operands)
            ]
            for i, (whole, aliasing) in record.together.items():
                (fenced[i],) = aliasing.rebuilt((), [fenced[whole]])
            loose = prim.dual or record.tape.loose
            for value in record.sent():
                untracked(value.fetch, after)
            replay = GraphReplay(record, after, loose, GraphConstants(region.shares), tag.close)
            if ambient.must_be_restored():
                stack.enter_context(ambient.restored())
            stack.enter_context(replaying(replay, region.name))
            span = next((NodeSpan(at[0]) for t in after if (at := traced(t)) is not None), None)
            made = tuple((prim.recorded or prim.body)(*fenced))
            if span is not None:
                if products := [node for node in span.nodes() if node.target in PRODUCTS]:
                    before_products(products)
                put_off(span)
            return made


# -- recomputations in one order ----------------------------------------------------------------------
# A fence stands behind its own cotangent. Two chains of regions whose losses are added have cotangents that
# are there from the start, so a compiler might recompute blocks of both at a time, and hold the working sets
# of all. Autograd's order, the reverse of the forward's, holds one.

_pulled: weakref.WeakKeyDictionary[Any, list[PullSpan]] = weakref.WeakKeyDictionary()


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
        self.before: list[PullSpan] = _pulled.setdefault(self.tracer, []) if found else []
        self.start = last_node(self.tracer) if found else None
        # What an earlier pass has made would be held for this one.
        same = bool(self.before) and self.before[-1].task == graph_task()
        self.latest = latest = self.before[-1] if same else None
        if latest is not None and not reads(self.given, latest.made):
            turn = latest.made[max(latest.made)]
            self.operands = [*operands[:first], fence(operands[first], [turn]), *operands[first + 1 :]]

    def done(self, gradients: Tensors, fetched: Tensors) -> None:
        """Note the results of the pull-back, and what was fetched for it."""
        found = [(t, at[1]) for t in gradients if (at := traced(t)) is not None]
        made = {node: t for t, node in found if node.op == "call_function"}
        if self.tracer is None or self.start is None or not made:
            return
        end = last_node(self.tracer)
        if fetched and self.latest is not None:
            ahead(self.tracer.graph, nodes_of(fetched), self.latest, made, self.start)
        sends = bool(fetched)
        self.before.append(PullSpan(graph_task(), self.start, end, self.given, made, sends, self.moved))

    def late_readers(self, results: Sequence[Node | None]) -> Late | None:
        """Who reads results of the region while it is not recomputed yet, but other regions were since its
        forward; None for nobody, or where a result is held anyway."""
        if not self.before or tracer_at_work() is None:
            return None
        late = Late(self.before, self.start)
        for i, result in enumerate(results):
            if result is not None and result.op == "call_function" and not late.find(i, result):
                return None
        return late if late.readers and late.wait_for(min(late.readers)) else None


# A recomputation is traced as a whole, before its backward. Left in that order its last results would be held
# while the gradients of those before them are computed.


def put_off(span: NodeSpan) -> None:
    """Put each recomputed op of a pull-back right before its first reader.

    Fences stay, since their names cost nothing, and so does what is more than its result: draws,
    collectives, ops of users. Torch's partitioner orders its own backwards so.
    """
    for node in reversed(list(span.nodes())):
        if node.users and RECOMPUTED in node.meta.get("custom", {}) and _may_wait(node):
            first = min(node.users)
            if first is not node.next:
                first.prepend(node)


def _may_wait(node: Node) -> bool:
    op = node.target
    if not is_pure_node(node):
        return False
    if not isinstance(op, OpOverload):
        return True
    return op.namespace in ("aten", "prims") and torch.Tag.nondeterministic_seeded not in op.tags


# -- constants: computed once in a graph -------------------------------------------------------------------
# What depends on nothing that a region is given, such as rotary tables, has no fence, and no memory that a
# fence could stand before. A compiler computes it again in every kernel that reads it, in the forward and in
# the backward, sines and all. So a value that costs more to compute than to read is made once, by the first
# region that asks for it. Others of the same ops take it, and so do recomputations: they run the ops as well,
# for regions around that count them, and nobody reads what comes of it.

# Ops that cost more than to read what they made. Others, such as comparisons, compilers compute where they
# are read.
DEAR = frozenset(
    "cos sin tan tanh polar exp exp2 expm1 log log2 log10 log1p pow sqrt rsqrt sigmoid erf cumsum cumprod "
    "sort index gather embedding".split()
)
# A constant of more ops than this is nothing that somebody writes down as a table.
_MOST_OPS = 64
# What a region's constants may take, as a share of its largest operand.
CONSTANT_SHARE = 0.25

_tables: weakref.WeakKeyDictionary[Any, dict[Hashable, torch.Tensor]] = weakref.WeakKeyDictionary()


class GraphConstants:
    """Finds the constants among a region's ops, in its forward or in its recomputation.

    Args:
        shares: whether the region may take what others have, too.
        operands: the region's; None where what was found in the forward is only looked up.
    """

    def __init__(self, shares: bool, operands: Sequence[torch.Tensor] | None = None) -> None:
        self.on, self.operands = shares, operands
        self.held = 0  # bytes
        # Memories of values that others have, too; a freed one's address comes again, so they are held.
        self.lent: dict[int, torch.UntypedStorage] = {}

    def met(self, facts: Traits, args: Any, out: Any) -> Any:
        """What stands for `out`, the result of an op that just ran."""
        if not self.on or facts.view or facts.writes or facts.random or not isinstance(out, torch.Tensor):
            return out
        if facts.name not in DEAR and not any(map(self.shares, tensors_in(args))):
            return out
        found = traced(out)
        key = None if found is None else constant_key(found[1])
        if found is None or key is None:
            return out
        table = _tables.setdefault(found[0], {})
        if key not in table:
            most = CONSTANT_SHARE * max(map(example_bytes, self.operands or ()), default=0)
            if (held := self.held + example_bytes(out)) > most:
                return out
            self.held = held
            table[key] = untracked(ONCE, out)
        made = untracked(as_it_is, table[key])
        self.lent[graph_storage(made)] = graph_memory(made)
        return made

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory that others have, too."""
        return bool(self.lent) and graph_storage(tensor) in self.lent


def constant_key(last: Node) -> Hashable:
    """What values that depend on nothing have in common if they are the same; None for other values."""
    numbers: dict[Node, int] = {}
    lines: list[Hashable] = []
    visits = iter(range(_MOST_OPS))

    def add(node: Node) -> bool:
        if node in numbers:
            return True
        if next(visits, None) is None or (line := _leaf(node)) is UNKNOWN:
            return False
        # Most values come from one nearby.
        if line is None and any(map(_is_given, node.all_input_nodes)):
            return False
        if line is None:
            if not all(map(add, node.all_input_nodes)):
                return False
            args, val = plain((tuple(node.args), dict(node.kwargs)), numbers), node.meta["val"]
            # Sizes that are not known yet have no hash.
            line = node.target, args, str((val.shape, val.stride())), val.dtype, val.device
            if args is UNKNOWN:
                return False
        numbers[node] = len(numbers)
        lines.append(line)
        return True

    return tuple(lines) if add(last) else None


def _is_given(node: Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)


def _leaf(node: Node) -> Any:
    """What a node without operands is; None for an op on others, UNKNOWN for what does not belong here."""
    val = node.meta.get("val")
    if isinstance(val, torch.SymInt):
        return "size", str(val.node.expr)
    if node.target is ONCE:
        return ONCE, node
    strided = isinstance(val, torch.Tensor) and val.layout is torch.strided
    if not strided or node.op != "call_function" or not isinstance(node.target, OpOverload):
        return UNKNOWN
    facts = traits(node.target)
    drawn = facts.writes or facts.may_draw or facts.uninitialized or facts.outside
    return UNKNOWN if drawn else None


# -- results that are read before their region's turn -------------------------------------------------------


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

    A result of a region can be read in the backward outside of every region: by the gradient of a pooling
    behind it. While other regions are recomputed it would be held for that. So its region is recomputed
    before such a reader has its turn, which then reads what was recomputed.

    What a region has sent to the host is fetched before the recomputation that is traced before its own.

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
    nodes, targets = list(nodes), set(made)
    behind = _behind(nodes, min(targets))
    return not targets.isdisjoint([*nodes, *(given for node in behind for given in node.all_input_nodes)])


# Of a graph under way: how many calls that are still to be pulled back are given a node's value.
_calls: weakref.WeakKeyDictionary[Any, Counter[Any]] = weakref.WeakKeyDictionary()


def given_to(operands: Tensors, calls: int = 1) -> None:
    """Note that so many calls of regions are given these operands, and are still to be pulled back."""
    for tensor in operands:
        if (at := traced(tensor)) is not None:
            _calls.setdefault(at[0], Counter())[at[1]] += calls


def isolate_shared_gradients(gradients: Tensors, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Gradients of a call's operands, each in memory of its own if another call's will be added to it.

    Compilers compute a sum over rows, such as a bias has for its gradient, in the kernel that adds it to
    another. That kernel runs in the last of the pull-backs, and what it reads of all others would be held
    until then.
    """
    given_to(operands, -1)

    def more(gradient: torch.Tensor, operand: torch.Tensor) -> bool:
        made, read = traced(gradient), traced(operand)
        others = made and read and _calls[read[0]][read[1]] > 0
        # A product is a buffer in any case.
        return bool(made and others and looked_at(made[1]).target not in PRODUCTS)

    pairs = zip(gradients, operands, strict=True)
    return tuple([fence(given, [given]) if more(given, operand) else given for given, operand in pairs])
