"""What a traced forward of a region notes for its recomputation, and the recomputation that follows it.

Recording and replaying are those of eager, made simple: what nobody reads is dead code that the compiler
drops, so nothing is skipped or freed here. Values that the selector keeps stay values of the graph.

And what spares most of the work on a model of many equal blocks, if their function is marked for it: of
regions that are alike the first one's graph becomes a subgraph, which is called for the others. So it is only
where everything that the nodes depend on is known to be the same; all else is traced.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from remat.transforms.compat import (
    NodeSpan,
    Template,
    as_it_is,
    depth,
    described,
    graph_memory,
    graph_storage,
    lowered_once,
    must_save,
    tags as tags_now,
    tracer_at_work,
)
from remat.transforms.compiled.barrier import ONCE, Origins, Sent, fence_below, snapshot
from remat.transforms.context import Mode, active, untracked
from remat.transforms.errors import RematError
from remat.transforms.functorch import Aliasing, PullBack
from remat.transforms.offload import INPUT, Elsewhere
from remat.transforms.ops import (
    Decisions,
    Traits,
    draws,
    grouped,
    is_shape_arithmetic,
    metadata,
    targets,
    tensors_in,
    traits,
)
from remat.transforms.region import Region
from remat.transforms.state import Ambient, can_seed, draw, new_seed, refuse_generator
from remat.transforms.tape import (
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    KeptValues,
    Node,
    Tape,
    ValueNumbering,
    map_tensors,
)

Tensors = Sequence[torch.Tensor]
# matmul ends in the one or the other, by whether a level below differentiates its operands.
_LOOKS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})


class GraphRecord(KeptValues):
    """Writes down a region's ops, and what of their results the recomputation takes from the forward.

    Args:
        region, operands: what is called, and with what.
        constants: finds what a graph computes once (`lowering.GraphConstants`).

    Attributes:
        seeds: the seed of every op that draws, by its position.
        draws: positions of the ops that draw.
        before: operands as they were before the region wrote to them, by their position.
        origins: which operands the recomputation starts from.
    """

    records = True

    def __init__(self, region: Region, operands: Tensors, constants: Any) -> None:
        super().__init__()
        self.region, self.tape = region, Tape(region.name)
        self.make_selector = region.selector
        self.selector = None if region.selector is None else region.selector()
        self.kept, self.kept_bytes, self._kept_in, self.op_in_parent = {}, 0, {}, {}
        self._numbers, self._passed = ValueNumbering(), ValueNumbering()
        self.seeds: dict[int, torch.Tensor] = {}
        self.draws: list[int] = []
        self.before: dict[int, torch.Tensor] = {}
        self.operands = list(operands)
        self.given = grouped(map(graph_storage, operands))
        # Operands that lie in another one, of which `before` has a copy.
        self.together: dict[int, tuple[int, Aliasing]] = {}
        self.origins = Origins(operands)
        self.storages: dict[int, int] = {}  # node -> storage of its first result
        self.rewritten: dict[int, Any] = {}  # storage -> the op that wrote first
        self.decisions = Decisions() if region.decisions else None
        self.writers: dict[int, int] = {}  # storage -> the last op that wrote to it
        self.keeps = False  # whether anything was kept but seeds
        self.constants = constants
        self.results: list[Any] = []  # the region's, as nodes of the graph

    @property
    def position(self) -> int:
        return len(self.tape.nodes)

    def values(self) -> list[torch.Tensor] | None:
        """What is held beside the operands; None where it is more than tensors of the graph."""
        held = list[Any]()
        map_tensors(held.append, list(self.kept.values()))
        if self.rewritten or any(isinstance(value, Elsewhere) for value in held):
            return None
        return [*held, *self.seeds.values()]

    def like(self, operands: Tensors, values: Tensors) -> GraphRecord:
        """The same forward of other operands, which holds other values."""
        left = iter(values)
        made = copy.copy(self)
        made.operands = list(operands)
        made.kept = {at: map_tensors(lambda _: next(left), value) for at, value in self.kept.items()}
        made.seeds = dict(zip(self.seeds, left, strict=True))
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = traits(func)
        if active.untracked or facts.ignored or is_shape_arithmetic(args, kwargs):
            return self._pass(func, facts, args, kwargs)
        for tensor in targets(facts, args, kwargs):
            self._before_writing(func, graph_memory(tensor))
        at = len(self.tape.nodes)
        if facts.random and draws(func, args, kwargs):
            self.draws.append(at)
            out = self._draw(at, func, args, kwargs)
        else:
            out = self.constants.met(facts, args, func(*args, **kwargs))
        self.origins.follow(func, facts, args, kwargs, out)
        self._note(at, func, facts, args, kwargs, out)
        return out

    def _pass(self, func: Any, facts: Traits, args: Any, kwargs: Any) -> Any:
        out, given = func(*args, **kwargs), next(iter(tensors_in(args)), None)
        if given is None or not isinstance(out, torch.Tensor):
            return out
        # How a region inside lets its results share memory is no op, but they are what they are seen in.
        if active.untracked and (facts.view or func is torch.ops.aten.clone.default):
            self.origins.follow(func, facts, args, kwargs, out)
            if (number := self._numbers.of(given)) is not None:
                self._numbers.add(out, number)
        # A detached value comes from the op that made it: decisions are made of those, too.
        if self.decisions is not None:
            self._passed.add(out, self._number_of(given))
        return out

    def _draw(self, at: int, func: Any, args: Any, kwargs: Any) -> Any:
        refuse_generator(self.region.name, func, args, kwargs)
        if active.seeding or not can_seed(func, args, kwargs):
            return func(*args, **kwargs)
        self.seeds[at] = seed = new_seed(func, args, kwargs)
        return draw(seed, func, args, kwargs)

    def _note(self, at: int, func: Any, facts: Any, args: Any, kwargs: Any, out: Any) -> None:
        tape, node = self.tape, Node()
        node.op, node.name, node.verdict, node.root = func, None, RECOMPUTE, at
        node.outs, node.deps, node.first = metadata(out), [], len(tape.makers)
        node.written, node.optional = (), False
        node.args = args[-1:] if facts.functional else ()  # a collective's group
        first = next(iter(tensors_in(args)), None) if facts.view else None
        number = None if first is None else self._numbers.of(first)
        if number is not None:
            node.root, node.deps = tape.root_of(number), [tape.makers[number]]
        tape.nodes.append(node)
        for tensor in tensors_in(out):
            self._numbers.add(tensor, len(tape.makers))
            tape.makers.append(at)
            self.storages.setdefault(at, graph_storage(tensor))
        if at in self.draws and at not in self.seeds:
            # A draw that cannot be repeated from a seed is kept: right, if not small.
            self.judge(at, SAVE, out)
        elif (shared := self._kept_around(at, func, out)) is not None:
            self.kept[at], self.keeps = shared, True
        elif self.selector is not None and (not facts.writes or facts.conditional is not None):
            self.judge(at, self.selector.decide(at, node, args, kwargs, out), out)
        if self.decisions is not None:
            read = [source for t in tensors_in((*args, *kwargs.values())) for source in self._sources(t)]
            given = (t.numel() for t in tensors_in((args, kwargs)))
            if self.decisions.meets(at, node, facts, read, at in self.kept, given):
                self.judge(at, SAVE, out)
        if at in self.kept:
            self.offer_around({at: self.kept[at]})
        for tensor in targets(facts, args, kwargs):
            self.writers[graph_storage(tensor)] = at

    def judge(self, at: int, verdict: int, out: Any) -> None:
        # A value of the graph would be an ordinary tensor, with which other ops run. Zeros of forward mode
        # have no memory, and lazy conjugates are seen anew in the memory that may be kept.
        if not any(t._is_zerotensor() or t.is_conj() or t.is_neg() for t in tensors_in(out)):
            super().judge(at, verdict, out)

    def _number_of(self, tensor: torch.Tensor) -> int:
        for known in (self._numbers, self._passed):
            if (number := known.of(tensor)) is not None:
                return number
        return -1

    def _sources(self, tensor: torch.Tensor) -> Iterator[int]:
        """The ops that an operand comes from, as `Decisions.meets` has them."""
        if (number := self._number_of(tensor)) >= 0:
            yield self.tape.makers[number]
        elif tensor.is_floating_point() or tensor.is_complex():
            yield -1
        if (writer := self.writers.get(graph_storage(tensor))) is not None:
            yield writer

    def _kept_around(self, at: int, func: Any, out: Any) -> Any:
        """What the region around this one has kept of the op that just ran, None for nothing."""
        around = self.parent
        if around is None or not 0 < around.position <= len(around.tape.nodes):
            return None
        self.op_in_parent[at] = place = around.position - 1
        kept = getattr(around, "kept", {}).get(place) if around.tape.nodes[place].op is func else None
        if isinstance(kept, Sent):
            # It has just come back, if that region is recomputed; else this one may say otherwise.
            return None if around.records else untracked(as_it_is, out)
        return kept

    def offer(self, at: int, value: Any, op: Any) -> None:
        super().offer(at, value, op)
        self.keeps = self.keeps or at in self.kept

    def _hold(self, at: int, node: Node, verdict: int, out: Any) -> Any:
        self.keeps = True
        send = functools.partial(Sent, waits=node.name == INPUT)
        return untracked(map_tensors, send if verdict == OFFLOAD else as_it_is, out)

    def _before_writing(self, func: Any, memory: torch.UntypedStorage) -> None:
        """Copy what is about to be written to.

        The write starts from the copy. Else a partitioner computes what was there in the backward, of a
        buffer that has been written to by then: buffers are free to save, to it. (Results of the region come
        after the copy, for the same reason; nothing is left of the write if all of it is written over.)
        """
        if (storage := memory._cdata) in self.rewritten:
            return
        self.rewritten[storage] = func
        self.origins.held.append(memory)
        group = self.given.get(storage, [])
        whole = max(group, key=lambda i: self.operands[i].numel(), default=0)
        for i in group:
            if i == whole:
                self.before[i] = was = untracked(snapshot, self.operands[i])
                untracked(_filled, self.operands[i], was)
                continue
            aliasing = Aliasing()
            untracked(aliasing.leaving, [self.operands[i]], [self.operands[whole]])
            if aliasing.specs is None:
                raise RematError(self.refusal(func, "which it reads through views that overlap"))
            self.together[i] = whole, aliasing

    @property
    def replaced(self) -> dict[int, torch.Tensor]:
        """By their positions, what the recomputation takes instead of operands that the region wrote to."""
        return self.before | {i: self.before[whole] for i, (whole, _) in self.together.items()}

    def sent(self) -> list[Sent]:
        """The kept values that lie in host memory."""
        found = list[Any]()
        map_tensors(found.append, list(self.kept.values()))
        return [value for value in found if isinstance(value, Sent)]

    def finished(self, graded: Sequence[bool]) -> None:
        """The forward is over; `graded`: which operands gradients flowed through before."""
        for tensor, was in zip(self.operands, graded, strict=True):
            if tensor.requires_grad and not was:
                func = self.rewritten.get(graph_storage(tensor))
                raise RematError(self.refusal(func, "numbers through which gradients flow"))
        if self.rewritten:
            for value in self.kept.values():
                untracked(map_tensors, must_save, value)

    def refusal(self, func: Any, what: str) -> str:
        return (
            f"region {self.region.name!r} writes with {func} into a tensor from outside the region, {what}. "
            "The derivative of that would be lost. Write out of place, or into a `.clone()` made in the "
            "region, and return the result."
        )


def _filled(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(value)


class GraphReplay(Mode):
    """Runs a region again: hands out kept values, draws from the same seeds, and checks that the ops are
    the same.

    Args:
        record: the forward.
        after: the cotangents, which kept values and seeds are fenced with.
        loose: op sequences cannot be compared (forward-mode derivatives are computed along).
        constants: as of the forward.
        finish: called when the recomputation is over and the backward begins.
    """

    def __init__(
        self,
        record: GraphRecord,
        after: Tensors,
        loose: bool,
        constants: Any,
        finish: Callable[[], None],
    ) -> None:
        super().__init__()
        self.tape, self.record, self.kept = record.tape, record, record.kept
        self.after, self.loose, self.finish = after, loose, finish
        self.at = self.drawn = 0
        self.done = False
        self.constants = constants

    @property
    def position(self) -> int:
        return self.at

    def forward_done(self) -> None:
        """What follows belongs to the backward."""
        self.done = True
        self.finish()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = traits(func)
        if self.done or active.untracked or facts.ignored or is_shape_arithmetic(args, kwargs):
            return func(*args, **kwargs)
        at, self.at = self.at, self.at + 1
        if facts.random and draws(func, args, kwargs):
            return self._draw(func, args, kwargs)
        if self.loose or not self.record.keeps:
            return self.constants.met(facts, args, func(*args, **kwargs))
        self._check(at, func)
        written = facts.view and self.record.storages.get(at) in self.record.rewritten
        if written or at not in self.record.kept:
            return self.constants.met(facts, args, func(*args, **kwargs))
        return self._hand_out(at)

    def _hand_out(self, at: int) -> Any:
        return untracked(map_tensors, self._fenced, self.record.kept[at])

    def _fenced(self, value: Any) -> torch.Tensor:
        if isinstance(value, Sent):
            return value.fenced(self.after)
        return fence_below(value, self.after)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        turn, self.drawn = self.drawn, self.drawn + 1
        if turn >= len(self.record.draws):
            raise RematError(self._differs(f"it draws more often, with {func}"))
        at = self.record.draws[turn]
        self._check(at, func)
        if (seed := self.record.seeds.get(at)) is None or at in self.record.kept:
            return self._write(func, args, kwargs, self._hand_out(at))
        return draw(untracked(fence_below, seed, self.after), func, args, kwargs)

    @staticmethod
    def _write(func: Any, args: Any, kwargs: Any, value: Any) -> Any:
        for target in targets(traits(func), args, kwargs):
            return target.copy_(value)
        return value

    def _check(self, at: int, func: Any) -> None:
        nodes = self.tape.nodes
        if at >= len(nodes) or not (nodes[at].op is func or _LOOKS.issuperset((nodes[at].op, func))):
            was = "ended" if at >= len(nodes) else f"ran {nodes[at].op}"
            raise RematError(self._differs(f"at op {at} the forward {was}, the recomputation runs {func}"))

    def _differs(self, what: str) -> str:
        return (
            f"the recomputation of region {self.tape.region!r} does not repeat its forward in the traced "
            f"graph: {what}. Please report this as a bug in remat; policy=save_nothing compiles such regions."
        )


# -- regions that are alike: the graph of the first is called ------------------------------------------------

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def dedup_key(region: Region, operands: Sequence[Any], ambient: Ambient) -> Hashable:
    """What two calls of regions have in common if they differ in their tensors only. None if that cannot be
    told: with regions inside, or with a policy that reads more than ops and shapes.
    """
    if (region.selector is not None and region.key is None) or not lowered_once():
        return None
    graph: Any = region.function
    code = _code(graph.module)
    rest = [None if isinstance(x, torch.Tensor) else plain(x, {}) for x in operands]
    if code is None or any(x is UNKNOWN for x in rest):
        return None
    tags = plain(tags_now(), {})
    around = (tuple(ambient.switches), ambient.autocast, ambient.modes)
    levels = (graph.depth, depth())
    found = (region.name, region.key, region.preserve_rng_state, code, tuple(rest), tags, around, levels)
    return None if tags is UNKNOWN else found


UNKNOWN = object()


def _code(module: torch.fx.GraphModule) -> Hashable:
    numbers: dict[torch.fx.Node, int] = {}
    lines: list[Hashable] = []
    for node in module.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            continue
        custom = plain(node.meta.get("custom"), {})
        args = plain((tuple(node.args), dict(node.kwargs)), numbers)
        # Constants and graphs inside are not looked into.
        if node.op in ("get_attr", "call_module") or args is UNKNOWN or custom is UNKNOWN:
            return None
        lines.append((node.op, node.target, args, custom, node.meta.get("stack_trace")))
    return len(numbers), tuple(lines)


def plain(value: Any, numbers: dict[torch.fx.Node, int]) -> Any:
    """`value` as something that can be compared, `UNKNOWN` if it is neither plain nor made of such."""
    kind = type(value)
    if isinstance(value, torch.fx.Node):
        return torch.fx.Node, numbers[value]
    if isinstance(value, (tuple, list)):
        parts = [plain(v, numbers) for v in value]
    elif isinstance(value, dict):
        parts = [plain(v, numbers) for pair in value.items() for v in pair]
    elif isinstance(value, slice):
        parts = [plain(v, numbers) for v in (value.start, value.stop, value.step)]
    else:
        # 0.0 and -0.0 are equal.
        return (kind, repr(value) if kind is float else value) if kind in _PLAIN else UNKNOWN
    return UNKNOWN if any(p is UNKNOWN for p in parts) else (kind, *parts)


class _Book:
    """The regions that were traced in one graph."""

    def __init__(self) -> None:
        # With a forward: what it left, how many of its results are the region's, and all that it returned.
        self.forwards: dict[Hashable, tuple[Template, GraphRecord, int, list[Any]]] = {}
        # With a pull-back: which of the gradients turned out not to matter.
        self.pulls: dict[Hashable, tuple[Template, frozenset[int]]] = {}


_books: weakref.WeakKeyDictionary[Any, _Book] = weakref.WeakKeyDictionary()


class GraphDedup:
    """One call of a region: a call of what one before it has left, or the model of those after it.

    Args:
        dedup_key: what it has in common with others, None where it is like no other.
        outs: what the region returns, as the call notes it: plain values, or `hole` for a tensor.
    """

    def __init__(self, dedup_key: Hashable = None, outs: list[Any] | None = None, hole: Any = None) -> None:
        self.dedup_key, self.hole = dedup_key, hole
        self.outs: list[Any] = [] if outs is None else outs
        self.key: Hashable = None  # once the forward is over, if it is a call or a model

    def forward(
        self, operands: Tensors, masks: Hashable, run: Callable[[], tuple[Any, Tensors]]
    ) -> tuple[Any, Tensors]:
        """What `run()` gives: the record of a forward, and its results. `masks` is what is differentiated."""
        tracer, given = self._traced(operands)
        if given is None:
            return run()
        key = (self.dedup_key, given, masks)
        book = _books.setdefault(tracer, _Book())
        if key in book.forwards:
            template, model, count, outs = book.forwards[key]
            made = template.paste(tracer, operands, {})
            if made is not None:
                self.key = key
                self.outs[:] = outs
                return model.like(operands, made[count:]), made[:count]
        span = NodeSpan(tracer)
        record, results = run()
        values = record.values()
        if values is None or any(x is not self.hole and plain(x, {}) is UNKNOWN for x in self.outs):
            return record, results
        alone = self.outs.count(self.hole) == len(results)
        template = span.cut(operands, [*results, *values], ONCE) if alone else None
        if template is not None:
            self.key = key
            book.forwards[key] = template, record, len(results), list(self.outs)
        return record, results

    def pull(
        self,
        operands: Tensors,
        record: Any,
        pulled: PullBack,
        tags: dict[str, str],
        run: Callable[[], Tensors],
    ) -> Tensors:
        """What `run()` gives: the gradients.

        `operands` are those of the forward, then the cotangents; `tags` are what the nodes of this very
        recomputation bear, where others bear their own.
        """
        again = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
        if self.key is None or again or pulled.over:
            return run()
        inputs = [*operands, *record.values()]
        tracer, given = self._traced(inputs)
        if given is None:
            return run()
        key = (self.key, given, tuple(pulled.mask), tuple(pulled.present))
        book = _books.setdefault(tracer, _Book())
        if key in book.pulls:
            template, unused = book.pulls[key]
            made = template.paste(tracer, inputs, tags)
            if made is not None:
                pulled.unused.update(unused)
                return made
        span = NodeSpan(tracer)
        grads = run()
        template = span.cut(inputs, grads, ONCE)
        if template is not None:
            book.pulls[key] = template, frozenset(pulled.unused)
        return grads

    def _traced(self, tensors: Tensors) -> tuple[Any, Hashable]:
        """The tracer at work and a description of the tensors, or two times None."""
        tracer = None if self.dedup_key is None else tracer_at_work()
        given = None if tracer is None else described(tensors)
        return tracer, given
