"""What depends on nothing that a region is given, such as rotary tables: computed once in a graph.

Such values have no fence, and no memory that a fence could stand before. A compiler computes them again in
every kernel that reads them, in the forward and in the backward, sines and all. So a value that costs more to
compute than to read is made once, by the first region that asks for it. Others of the same ops take it, and
so do recomputations: they run the ops as well, for regions around that count them, and nobody reads what
comes of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.fx import Node

from remat.transforms.compat import OpOverload, as_it_is, example_of, graph_memory, graph_storage, traced
from remat.transforms.compiled.barrier import ONCE, UNKNOWN, plain
from remat.transforms.context import quiet
from remat.transforms.ops import Traits, tensors_in, traits

# Ops that cost more than to read what they made. Others, such as comparisons, compilers compute where they
# are read.
_DEAR = frozenset(
    "cos sin tan tanh polar exp exp2 expm1 log log2 log10 log1p pow sqrt rsqrt sigmoid erf cumsum cumprod "
    "sort index gather embedding".split()
)
# A constant of more ops than this is nothing that somebody writes down as a table.
_MOST_OPS = 64
# What a region's constants may take, as a share of its largest operand.
_SHARE = 0.25

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
        if facts.name not in _DEAR and not any(map(self.shares, tensors_in(args))):
            return out
        found = traced(out)
        key = None if found is None else _structure(found[1])
        if found is None or key is None:
            return out
        table = _tables.setdefault(found[0], {})
        if key not in table:
            most = _SHARE * max(map(_bytes, self.operands or ()), default=0)
            if (held := self.held + _bytes(out)) > most:
                return out
            self.held = held
            table[key] = quiet(ONCE, out)
        made = quiet(as_it_is, table[key])
        self.lent[graph_storage(made)] = graph_memory(made)
        return made

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory that others have, too."""
        return bool(self.lent) and graph_storage(tensor) in self.lent


def _bytes(tensor: torch.Tensor) -> int:
    count = tensor.element_size()
    for size in tensor.shape:
        count *= example_of(size)
    return count


def _structure(last: Node) -> Hashable:
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
