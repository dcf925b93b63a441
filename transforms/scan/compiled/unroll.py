"""Blocks of a scan's steps, compiled: one graph that runs a block, one that pulls back through it.

Both are traced from a flat step, unrolled `size` times, with plain tensors for all it reads. Neither Dynamo
nor autograd runs between one block and the next. What the pull-back needs of the forward is its *tape*: the
carries between the steps, and what a selector keeps. In the graph that pulls back they stand in the place of
the ops that made them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from remat.transforms.compat import (
    OpOverload,
    compiled_bare,
    example_bytes,
    example_of,
    fake_mode,
    is_inductor,
    outside_all_modes,
    stands_on,
    traced_functionally,
)
from remat.transforms.compiled import (
    CONSTANT_SHARE,
    DEAR,
    ONCE,
    PRODUCTS,
    before_products,
    constant_key,
    is_view,
)
from remat.transforms.context import scoped
from remat.transforms.ops import tensors_in, traits
from remat.transforms.scan.spec import Leaves, Step, Tensors
from remat.transforms.scan.vjp import pull
from remat.transforms.tape import OFFLOAD, SAVE, Recorder, Tape

Columns = list[list[torch.Tensor]]
Compiled = Callable[..., Any]

# Blocks whose rows are looked up at a time.
MOST = 256


@dataclass
class UnrolledStep:
    """A scan's step, unrolled `size` times and compiled.

    Attributes:
        step: `step(consts, carry, x) -> (carry, ys)`, of tensors only.
        size: how many steps there are in a block.
        reverse: whether rows and ys run from the last to the first.
        compiler: a backend of torch.compile.
        selector: makes the selector of what is kept of a step, None for carries alone.
        made: what has been compiled, by what it is for.
        consts: what every step reads besides, in one run of the scan.
    """

    step: Step
    size: int
    reverse: bool
    compiler: Callable[..., Any]
    selector: Callable[[], Any] | None = None
    made: dict[Any, Any] = field(default_factory=dict)

    consts: list[torch.Tensor] = field(default_factory=list)
    # Of these consts: what to call, so that it is looked up once a run.
    _found: dict[Any, Any] = field(default_factory=dict)

    def at(self, consts: Tensors) -> UnrolledStep:
        """The same for one run of the scan, whose blocks all read these consts and are all of one shape."""
        return replace(self, consts=[t.detach() for t in consts], _found={})

    # -- calls ---------------------------------------------------------------------------------------------

    def run(
        self, carry: Leaves, xs: Sequence[torch.Tensor], tape: bool
    ) -> tuple[Leaves, Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The carry after a block, its ys stacked, and what pulling back needs; carry and `xs` are dense."""
        tape = tape and self.selector is not None  # carries are there anyway
        found = self._found.get(tape)
        if found is None:
            values, b = [*self.consts, *carry, *xs], len(carry)
            made = self._lookup(("run", tape), values, lambda: self._made_run(values, b, tape))
            count = b + (len(self._wanted(self.consts, carry, xs)) if tape else 0)
            found = self._found[tape] = made, b, count
        call, b, count = found
        outs = call(*self.consts, *carry, *xs)
        return [t.select(0, -1) for t in outs[:b]], outs[count:], outs[:count]

    def pull(
        self,
        carry: Leaves,
        xs: Sequence[torch.Tensor],
        tape: Sequence[torch.Tensor] | None,
        cts: tuple[Any, Any],
        needs: tuple[Any, Any],
        sums: list[torch.Tensor | None],
    ) -> tuple[Any, Any]:
        """Gradients of the carry and of the rows of xs, those of the consts added to `sums` (None is zero);
        carry and `xs` are dense. `cts`: of the carry, of the ys.

        Without a tape the steps are evaluated again on the way.
        """
        whole = [*cts[0], *cts[1]]
        key = tuple([ct is not None for ct in whole]), tape is not None
        given = [ct.contiguous() for ct in whole if ct is not None]
        values = [*self.consts, *carry, *xs, *given, *(tape or ())]
        found = self._found.get(key)
        if found is None:
            full = "pull", *key, len(cts[0]), tuple(needs[0]), tuple(needs[1])
            sizes = len(carry), len(xs), len(tape or ())
            found = self._lookup(full, values, lambda: self._made_pull(values, *sizes, cts, needs))
            self._found[key] = found
        call, added, here = found
        before = [_sum_so_far(sums[i], self.consts[i]) for i in added]
        outs = call(*values, *before)
        count = len(before)
        for i, total in zip(added, outs, strict=False):
            sums[i] = total
        flat = [None if at is None else outs[count + at] for at in here]
        b = len(carry)
        return flat[:b], flat[b:]

    def rows(self, xs: Sequence[torch.Tensor], count: int) -> Sequence[Sequence[torch.Tensor]]:
        """The rows of `count` blocks, in the order in which they run; `xs` are all of them, and dense."""
        if not xs:
            return [()] * count
        columns = [x.view(count, self.size, *x.shape[1:]).unbind(0) for x in xs]
        return list(zip(*(column[::-1] if self.reverse else column for column in columns), strict=True))

    def tape_of(self, carry: Tensors, xs: Tensors) -> list[tuple[torch.Tensor, bool]]:
        """Tensors such as a block's tape has of each step, and which of them belong on the host."""
        return [*((t, False) for t in carry), *self._selected(self.consts, carry, xs)[1]]

    def host(self, carry: int) -> list[bool]:
        """Which of a tape's tensors belong on the host; known once a tape has been made."""
        return [False] * carry + [out for _, out in self._found.get("kept", ((), ()))[1]]

    def _lookup(self, key: Any, values: list[torch.Tensor], make: Callable[[], Any]) -> Any:
        at = stands_on(self.compiler)
        made, full = self.made, (*key, self.size, self.reverse, _signature(values, at))
        if full not in made:
            with scoped(owner=made.setdefault("inside", [])):
                made[full] = make()
        return made[full]

    # -- what is compiled ----------------------------------------------------------------------------------

    def _made_run(self, values: list[torch.Tensor], b: int, tape: bool) -> Compiled:
        a = len(self.consts)
        wanted = self._wanted(values[:a], values[a : a + b], values[a + b :]) if tape else []

        def block(*values: torch.Tensor) -> list[torch.Tensor]:
            state: Leaves = list(values[a : a + b])
            tapes, columns = [], []
            for x in self._rows(values[a + b :]):
                state, ys, kept = self._step(values[:a], state, x, bool(wanted))
                tapes.append([*state, *(kept[i] for i in wanted)])
                columns.append(ys)
            ordered = columns[::-1] if self.reverse else columns
            return [*_stacked(tapes), *_stacked(ordered)]

        return self._compiled(_traced(block, values, self.compiler))

    def _made_pull(
        self, values: list[torch.Tensor], b: int, c: int, tapes: int, cts: Any, needs: tuple[Any, Any]
    ) -> tuple[Compiled, list[int], list[int | None]]:
        """What pulls back, the consts whose gradients it adds up, where the others' gradients are."""
        a = len(self.consts)
        wanted = self._wanted(values[:a], values[a : a + b], values[a + b : a + b + c]) if tapes > b else []
        graph, here, _ = self._pulling(values, a, b, c, tapes, cts, needs, wanted)
        added = [i for i in range(a) if here[i]]
        added_to_inputs(graph, len(added))
        rest = itertools.count()
        made = self._compiled(graph, range(a + b + c, len(values) - tapes))
        return made, added, [next(rest) if yes else None for yes in here[a:]]

    def _pulling(
        self,
        values: list[torch.Tensor],
        a: int,
        b: int,
        c: int,
        tapes: int,
        cts: Any,
        needs: tuple[Any, Any],
        wanted: Sequence[int],
    ) -> tuple[torch.fx.GraphModule, tuple[bool, ...], list[bool]]:
        """The graph that pulls back, which of the gradients it makes, which of the tape it reads."""
        present = [ct is not None for ct in (*cts[0], *cts[1])]
        found: list[bool] = []
        first = len(values) - tapes

        def gradient(*values: torch.Tensor) -> list[torch.Tensor]:
            rest = iter(values[a + b + c : first])
            given = [next(rest) if here else None for here in present]
            y_cts = [
                [None if ct is None else ct.select(0, self._at(k)) for ct in given[len(cts[0]) :]]
                for k in range(self.size)
            ]
            made: list[torch.Tensor] = []

            def steps(consts: Tensors, carry: Leaves, rows: Any) -> tuple[Leaves, list[Any]]:
                ys = []
                for x in rows:
                    carry, y, kept = self._step(consts, carry, x, bool(wanted))
                    ys.append(y)
                    made.extend([*carry, *(kept[i] for i in wanted)])
                return carry, ys

            rows = self._rows(values[a + b : a + b + c])
            carry_cts = given[: len(cts[0])]
            grads = pull(steps, values[:a], list(values[a : a + b]), rows, carry_cts, y_cts, needs)
            flat = [*grads[0], *grads[1], *self._x_grads(grads[2], values[a + b : a + b + c])]
            found[:] = [grad is not None for grad in flat]
            outs = [grad for grad in flat if grad is not None]
            if not tapes:
                return outs
            # The next carry of the last step is read by nobody.
            known = [t.select(0, k) for k in range(self.size) for t in values[first:]]
            return [*outs, *known, *made]

        graph = _traced(gradient, values, self.compiler)
        only_rows_viewed(graph)
        reads = put_in_place(graph, self.size * tapes, tapes)
        return graph, tuple(found), reads

    def _step(
        self, consts: Tensors, carry: Leaves, x: Tensors, keep: bool
    ) -> tuple[Leaves, list[torch.Tensor], Sequence[torch.Tensor]]:
        if keep:
            return keep_of(self.step, self.selector, consts, carry, x)
        return *self.step(consts, carry, x), ()

    # -- what the selector keeps ---------------------------------------------------------------------------

    def _wanted(self, consts: Tensors, carry: Tensors, xs: Tensors) -> list[int]:
        """Which of the values that the selector keeps of a step a pull-back reads."""
        return self._selected(consts, carry, xs)[0]

    def _selected(self, consts: Tensors, carry: Tensors, xs: Tensors) -> Any:
        if self.selector is None:
            return [], []
        if "kept" not in self._found:
            key, values = ("kept",), [*consts, *carry, *(x.narrow(0, 0, 1) for x in xs)]
            make = lambda: self._select(values, len(consts), len(carry))  # noqa: E731
            self._found["kept"] = self._lookup(key, values, make)
        return self._found["kept"]

    def _select(self, values: list[torch.Tensor], a: int, b: int) -> Any:
        # Of one step, pulled back through with a cotangent for every result: whatever a pull-back may read.
        one = UnrolledStep(self.step, 1, False, self.compiler, self.selector).at(values[:a])
        like: list[Any] = []

        def look(*values: torch.Tensor) -> list[torch.Tensor]:
            rows = [x.select(0, 0) for x in values[a + b :]]
            new, ys, kept = keep_of(self.step, self.selector, values[:a], list(values[a : a + b]), rows)
            like[:] = [len(new), len(ys), *zip(kept, kept.host, strict=True)]
            return [*new, *ys, *kept]

        rows = values[a + b :]
        graph = _traced(look, values, self.compiler)
        metas = [_empty(node.meta["val"]) for node in results(graph)]
        hosts = [host for _, host in like[2:]]
        news, ys, kept = metas[:b], metas[b : b + like[1]], metas[b + like[1] :]
        cts = (
            [t if t.is_floating_point() else None for t in news],
            [y.unsqueeze(0) if y.is_floating_point() else None for y in ys],
        )
        given = [ct for ct in (*cts[0], *cts[1]) if ct is not None]
        tape = [t.unsqueeze(0) for t in (*news, *kept)]
        needs = [True] * a, [True] * len(rows)
        count = len(tape)
        full = [*values[: a + b], *rows, *given, *tape]
        reads = one._pulling(full, a, b, len(rows), count, cts, needs, range(len(kept)))[2]
        at = [i for i in range(len(kept)) if reads[b + i]]
        return at, [(kept[i], hosts[i]) for i in at]

    # -- rows ----------------------------------------------------------------------------------------------

    def _at(self, k: int) -> int:
        return self.size - 1 - k if self.reverse else k

    def _rows(self, xs: Sequence[torch.Tensor]) -> Columns:
        return [[x.select(0, self._at(k)) for x in xs] for k in range(self.size)]

    def _x_grads(
        self, rows: list[list[torch.Tensor | None]], xs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for i, x in enumerate(xs):
            column = [row[i] for row in (rows[::-1] if self.reverse else rows)]
            zero = None if all(g is None for g in column) else torch.zeros_like(x.select(0, 0))
            found.append(None if zero is None else torch.stack([zero if g is None else g for g in column]))
        return found

    def _compiled(self, graph: torch.fx.GraphModule, cotangents: range = range(0)) -> Compiled:
        if not results(graph):
            return lambda *_: ()
        inputs = [_empty(node.meta["val"]) for node in graph.graph.find_nodes(op="placeholder")]
        if is_inductor(self.compiler) or stands_on(self.compiler):  # others copy what is fenced
            activations_first(graph, cotangents)
            constants_once(graph)
        return compiled_bare(self.compiler, graph, inputs)


def _traced(
    function: Callable[..., Any], values: Sequence[torch.Tensor], compiler: Callable[..., Any]
) -> torch.fx.GraphModule:
    with outside_all_modes():
        # Not the values themselves: rows lie in larger tensors, and forward-mode AD looks at that.
        with fake_mode([]):
            like = [_empty(t, stands_on(compiler)) for t in values]
        return traced_functionally(function, like, compiler)


def _empty(t: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    sizes, strides = (tuple(map(example_of, s)) for s in (t.shape, t.stride()))
    return torch.empty_strided(sizes, strides, dtype=t.dtype, device=device or t.device)


def dense(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Alike in every block: compiled code is for certain strides, and rows of a tensor are contiguous."""
    return [t.detach().contiguous() for t in tensors]


def _sum_so_far(total: torch.Tensor | None, const: torch.Tensor) -> torch.Tensor:
    if total is None:
        return torch.zeros(const.shape, dtype=const.dtype, device=const.device)
    return total.contiguous()


def _signature(values: Sequence[torch.Tensor], device: torch.device | None) -> Any:
    return tuple([(t.shape, t.stride(), t.dtype, device or t.device) for t in values])


def _stacked(columns: Columns) -> list[torch.Tensor]:
    return [torch.stack(column) for column in zip(*columns, strict=True)]


# -- kept ------------------------------------------------------------------------------------------------
# What a selector keeps of one step beside the carry.


class Kept(list[torch.Tensor]):
    """What a selector keeps of one step, and which of it belongs on the host."""

    host: tuple[bool, ...] = ()


def keep_of(
    step: Step, selector: Callable[[], Any] | None, consts: Tensors, carry: Leaves, x: Tensors
) -> tuple[Leaves, list[torch.Tensor], Kept]:
    """One step, with what a selector keeps of it."""
    if selector is None:
        return *step(consts, carry, x), Kept()
    record = _Keeping(Tape("step"), selector, [*consts, *carry, *x])
    chosen: Any = record.selector
    with chosen.watching(), record:
        new, ys = step(consts, carry, x)
    chosen.finished(record.tape)
    return new, ys, record.found()


class _Keeping(Recorder):
    """Keeps values where they are, and notes which of them belong on the host."""

    def judge(self, at: int, verdict: int, out: Any) -> None:
        super().judge(at, min(verdict, 1) * SAVE, out)
        self.tape.nodes[at].verdict = verdict

    def found(self) -> Kept:
        nodes, kept, host = self.tape.nodes, Kept(), []
        for i, value in sorted(self.kept.items()):
            root = nodes[i].root
            # A view costs nothing to take again of what is there.
            if root != i and (root < 0 or root in self.kept) and traits(nodes[i].op).view:
                continue
            values = list(tensors_in(value))
            kept += values
            host += [nodes[i].verdict == OFFLOAD] * len(values)
        kept.host = tuple(host)
        return kept


# -- fx passes -------------------------------------------------------------------------------------------
# What is done to the graphs of a scan's blocks before they are compiled.


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
