"""Recomputation under functorch levels: a function as a primitive, with rules for grad, vmap and jvp.

`call(prim, operands)` peels the levels off one by one, from the innermost, and runs the function below all:

- vmap: the primitive of the batched function;
- jvp: the primitive of the function that also makes the tangents (no second evaluation, as in JAX);
- grad: a node that holds the operands; its backward calls another primitive, the pull-back, which recomputes.
  So any nesting follows from three rules, and second order is as lean as first.

`torch.autograd.Function` offers the same three rules, but its jvp rule evaluates the function a second time,
and torch.func.grad always differentiates with create_graph=True: what an ordinary backward recomputes is
recorded again at that level, and nothing is saved (FACTS section 2). Here the pull-back of a level leaves no
record at its own level. Peeling by hand follows torch._functorch.autograd_function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from remat.transforms.compat import in_transform, innermost_level, unwrap_if_dead, unwrapped
from remat.transforms.functorch.recorded import Recorded
from remat.transforms.region import Region
from remat.transforms.state import Ambient
from remat.transforms.tape import storage

Tensors = Sequence[torch.Tensor]
Body = Callable[..., tuple[torch.Tensor, ...]]


class Residuals:
    """What the forward of one node leaves for its pull-back, besides the operands."""

    def __init__(self) -> None:
        self.recorded: Recorded | None = None
        self.written: Any = None  # in a traced graph: what its `World` noted in the forward

    def needs(self, tensor: torch.Tensor) -> bool:
        """Whether the pull-back reads this operand."""
        recorded = self.recorded
        if recorded is None or recorded.storages is None:
            return True
        return storage(unwrapped(tensor)) in recorded.storages


class World(Protocol):
    """Where primitives run that do not run in eager."""

    def forward(self, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
        """Run a region's function, below all levels."""
        ...

    def pull(self, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
        """Recompute and pull back, below all levels."""
        ...


@dataclass
class Family:
    """What all primitives derived from one call of a region share."""

    region: Region
    ambient: Ambient
    world: World | None = None  # None is eager
    # Set while the recorded forward runs: the hook that watches what autograd would save, and what to do with
    # the results.
    watch: Callable[[torch.Tensor], Any] | None = None
    made: Callable[[Tensors], None] | None = None


@dataclass(frozen=True)
class Prim:
    """A function of tensors to a tuple of tensors, ready to be called under any levels.

    Attributes:
        body: the function.
        recorded: the function as the nodes above want it recorded (see `as_differentiated`), None when none;
            of a pull-back only where ops are compared (`_compares`).
        family: what it shares with its relatives.
        pulls: whether this is a pull-back, which recomputes.
        sinks: forward only: where the recorded run leaves its residuals.
        source: pull-back only: the residuals to use.
        own_level: pull-back only: the functorch level whose backward this is, or None.
        present: pull-back only: the results of the region that have a cotangent, or None for all.
        cotangents: pull-back only: which of the operands are its cotangents.
        dual: whether tangents are computed along; then op sequences cannot be compared (`Tape.loose`).
        mapped: whether `body` is a batched or a dual form of the function.
        masks: forward only: the operands that each of the nodes above differentiates.
    """

    reads_more = True  # what a region inside captures without a derivative, its hooks do not always tell

    body: Body
    family: Family
    recorded: Body | None = None
    pulls: bool = False
    sinks: tuple[Residuals, ...] = ()
    source: Residuals | None = None
    own_level: int | None = None
    present: tuple[int, ...] | None = None
    dual: bool = False
    cotangents: tuple[int, int] = (0, 0)
    mapped: bool = False
    masks: tuple[tuple[int, ...], ...] = ()


Rule = Callable[[Any, Prim, Tensors], tuple[torch.Tensor, ...]]

# How to run a primitive under a level of each kind, and (None) below them all. `nodes` and `rules` call
# primitives themselves, so they come after this file and add theirs; the face of the room imports them.
_rules: dict[Any, Rule] = {}


def rule(kind: Any) -> Callable[[Rule], Rule]:
    """Make the function below the rule for functorch levels of this kind; None: below all levels."""

    def add(function: Rule) -> Rule:
        _rules[kind] = function
        return function

    return add


def call(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run `prim` under whatever functorch levels are active."""
    operands = [unwrap_if_dead(t) for t in operands]
    level = innermost_level() if in_transform() else None
    found = _rules.get(None if level is None else level.key())
    if found is None:
        # torch.func.functionalize: nothing to save there, the function runs as it is.
        return tuple(prim.body(*operands))
    return found(level, prim, operands)
