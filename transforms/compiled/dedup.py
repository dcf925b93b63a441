"""Regions of one trace that are alike: the graph of the first is copied for the others.

A model of many equal blocks is a region called many times with the same code on tensors of the same shapes.
To trace its forward, its recomputation and its backward through autograd, functionalization and fake
tensors takes many times as long as to copy the nodes that came of it. A copy is made only where everything
that the nodes depend on is known to be the same; all else is traced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Node

from remat.transforms.compat import NodeSpan, Template, depth, described, graph_storage, tracer_at_work
from remat.transforms.compat import tags as aot_tags
from remat.transforms.region import Region
from remat.transforms.state import Ambient

Tensors = Sequence[torch.Tensor]
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Pulled(Protocol):
    """Which gradients a pull-back makes, of which results."""

    @property
    def mask(self) -> list[int]: ...
    @property
    def present(self) -> list[int]: ...
    @property
    def over(self) -> tuple[Any, ...]: ...
    @property
    def unused(self) -> set[int]: ...


class Record(Protocol):
    """What a forward leaves for its recomputation."""

    def values(self) -> list[torch.Tensor] | None:
        """The tensors in it beside the operands, None where they are more than that."""
        ...

    def like(self, operands: Tensors, values: Tensors) -> Record:
        """The same with other tensors."""
        ...


def dedup_key(region: Region, operands: Sequence[Any], ambient: Ambient) -> Hashable:
    """What two calls of regions have in common if one is a copy of the other but for its tensors; None where
    that cannot be told: regions inside it, policies that look at more than ops and shapes."""
    if region.selector is not None and region.key is None:
        return None
    graph: Any = region.function
    code = _code(graph.module)
    rest = [None if isinstance(x, torch.Tensor) else _plain(x, {}) for x in operands]
    if code is None or any(x is _UNKNOWN for x in rest):
        return None
    tags = _plain(aot_tags(), {})
    around = (tuple(ambient.switches), ambient.autocast, ambient.device)
    levels = (graph.depth, depth())
    found = (region.name, region.key, region.preserve_rng_state, code, tuple(rest), tags, around, levels)
    return None if tags is _UNKNOWN else found


_UNKNOWN = object()


def _code(module: torch.fx.GraphModule) -> Hashable:
    numbers: dict[Node, int] = {}
    lines: list[Hashable] = []
    for node in module.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            continue
        custom = _plain(node.meta.get("custom"), {})
        args = _plain((tuple(node.args), dict(node.kwargs)), numbers)
        # Constants and graphs inside are not looked into.
        if node.op in ("get_attr", "call_module") or args is _UNKNOWN or custom is _UNKNOWN:
            return None
        lines.append((node.op, node.target, args, custom, node.meta.get("stack_trace")))
    return len(numbers), tuple(lines)


def _plain(value: Any, numbers: dict[Node, int]) -> Any:
    """`value` as something that can be compared, `_UNKNOWN` if it is neither plain nor made of such."""
    kind = type(value)
    if isinstance(value, Node):
        return Node, numbers[value]
    if isinstance(value, (tuple, list)):
        parts = [_plain(v, numbers) for v in value]
    elif isinstance(value, dict):
        parts = [_plain(v, numbers) for pair in value.items() for v in pair]
    elif isinstance(value, slice):
        parts = [_plain(v, numbers) for v in (value.start, value.stop, value.step)]
    else:
        # 0.0 and -0.0 are equal.
        return (kind, repr(value) if kind is float else value) if kind in _PLAIN else _UNKNOWN
    return _UNKNOWN if any(p is _UNKNOWN for p in parts) else (kind, *parts)


class _Book:
    """The regions that were traced in one graph."""

    def __init__(self) -> None:
        # With a forward: what it left, how many of its results are the region's, and all that it returned.
        self.forwards: dict[Hashable, tuple[Template, Record, int, list[Any]]] = {}
        # With a pull-back: which of the gradients turned out not to matter.
        self.pulls: dict[Hashable, tuple[Template, frozenset[int]]] = {}


_books: weakref.WeakKeyDictionary[Any, _Book] = weakref.WeakKeyDictionary()


class GraphDedup:
    """One call of a region: a copy of one before it, or the model of those after it.

    Args:
        dedup_key: what it has in common with others, None where it is like no other.
        outs: what the region returns, as the call notes it: plain values, or `hole` for a tensor.
    """

    def __init__(
        self, dedup_key: Hashable = None, outs: list[Any] | None = None, hole: object = None
    ) -> None:
        self.dedup_key, self.hole = dedup_key, hole
        self.outs: list[Any] = [] if outs is None else outs
        self.key: Hashable = None  # once the forward is over, if it was copied or may be

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
        if values is None or any(x is not self.hole and _plain(x, {}) is _UNKNOWN for x in self.outs):
            return record, results
        memory = [graph_storage(t) for t in (*operands, *results)]
        # Copies of results have memory of their own each: what is written to one is not seen in another.
        alone = len(set(memory)) == len(memory) and self.outs.count(self.hole) == len(results)
        template = span.cut(operands, [*results, *values]) if alone else None
        if template is not None:
            self.key = key
            book.forwards[key] = template, record, len(results), list(self.outs)
        return record, results

    def pull(
        self, operands: Tensors, record: Any, pulled: Pulled, tags: dict[str, str], run: Callable[[], Tensors]
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
        template = span.cut(inputs, grads)
        if template is not None:
            book.pulls[key] = template, frozenset(pulled.unused)
        return grads

    def _traced(self, tensors: Tensors) -> tuple[Any, Hashable]:
        """The tracer at work and a description of the tensors, or two times None."""
        tracer = None if self.dedup_key is None else tracer_at_work()
        given = None if tracer is None else described(tensors)
        return tracer, given
