"""Decisions of a forward: integers and bools that it made of floats, such as the indices of `topk`.

A recomputation may give floats with other last bits (another kernel, another order of sums). To a float that
does nothing. An index that flips picks another expert, and the gradient is that of another function. So
decisions are kept; `docs/design.md` says which ops count, and why others do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from remat.transforms.compat import OpOverload
from remat.transforms.ops import Traits, traits
from remat.transforms.placeholders import Meta
from remat.transforms.tape.tape import Node, Tape
from remat.transforms.tape.values import metas

# Where a float may come from: numbers that are the same in every run, data, data that was computed with.
FIXED, GIVEN, COMPUTED = 0, 1, 2
# Ops that make no new numbers of their operands, views aside.
_MOVES = frozenset({"clone", "_to_copy", "copy", "copy_", "contiguous", "fence"})
# Steps, whose results are floats: what they say is no more, and no less, than an integer would.
_STEPS = frozenset({"round", "floor", "ceil", "trunc", "sign", "sgn", "heaviside", "floor_divide"})
_STEPS |= {"bernoulli", "binomial", "poisson"}
# They say where they took a value from, and take it there and then: no other op need read that.
_TAKING = ("max_pool", "fake_quantize")


class Decisions:
    """Follows the ops of a forward, and tells which of them decide.

    Attributes:
        levels: for every op what its results come from, where that is not FIXED.
    """

    __slots__ = ("levels",)

    def __init__(self, tape: Tape | None = None) -> None:
        """`tape`: what has run already; its verdicts say what is kept."""
        self.levels: dict[int, int] = {}
        for at, node in enumerate(tape.nodes if tape is not None else ()):
            assert tape is not None
            self.meets(at, node, traits(node.op), read_by(node, tape), bool(node.verdict))

    def meets(self, at: int, node: Node, facts: Traits, read: Iterable[int], kept: bool) -> bool:
        """Whether op `at` decides; `read`: ops whose results it reads, and -1 for floats from outside;
        `kept`: whether its result is kept in any case."""
        levels = self.levels
        level = max([GIVEN if i < 0 else levels.get(i, FIXED) for i in read], default=FIXED)
        if level == FIXED:
            return False
        discrete = [meta for meta in metas(node.outs) if not _is_inexact(meta)]
        decides = level == COMPUTED and not kept and _decides(node, facts, discrete)
        levels[at] = _after(level, node, facts, discrete, kept or decides)
        return decides


def _after(level: int, node: Node, facts: Traits, discrete: list[Meta], kept: bool) -> int:
    """What the results of an op come from, by what its operands do."""
    if facts.view:
        return level
    name = _name(node.op)
    # A step that is kept is data; but an index made of it may be what is worth keeping.
    if kept and name not in _STEPS:
        return GIVEN
    if name in _MOVES or (discrete and len(discrete) == len(metas(node.outs))):
        return level
    return COMPUTED


def _decides(node: Node, facts: Traits, discrete: list[Meta]) -> bool:
    if facts.view or (facts.writes and facts.conditional is None) or node.optional:
        return False
    made = metas(node.outs)
    if not made:
        # A number that Python has read.
        return isinstance(node.outs, (bool, int, float))
    if len(made) == 1:
        return bool(discrete) or _name(node.op) in _STEPS
    if facts.random or not isinstance(node.op, OpOverload) or _name(node.op).startswith(_TAKING):
        return False
    # Of fused attention the state of the generator, say, is no reason to keep the whole.
    most = max([meta[0].numel() for meta in made if _is_inexact(meta)], default=0)
    return any(meta[0].numel() >= most for meta in discrete)


def _is_inexact(meta: Meta) -> bool:
    dtype: torch.dtype = meta[2]
    return dtype.is_floating_point or dtype.is_complex


def _name(op: Any) -> str:
    return getattr(getattr(op, "_schema", None), "name", "").rpartition("::")[2]


def read_by(node: Node, tape: Tape) -> Iterator[int]:
    """What an op on a tape reads, as `Decisions.meets` has it."""
    yield from node.deps
    if any(_is_inexact(tape.outside[i].meta) for i in node.external):
        yield -1
