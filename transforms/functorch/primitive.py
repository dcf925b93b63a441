"""Recomputation under functorch levels: a function as a primitive, with rules for grad, vmap and jvp.

`call(prim, operands)` peels the levels off one by one, from the innermost, and runs the function below all:

- vmap: the primitive of the batched function;
- jvp: the primitive of the function that also makes the tangents (no second evaluation, as in JAX);
- grad: a node that holds the operands; its backward calls another primitive, the pull-back, which recomputes.
  So any nesting follows from three rules, and second order is as lean as first.

The pull-back runs the function, not its ops: of k nested regions the innermost function runs 1 + k times, as
in JAX.

`torch.autograd.Function` has the same three rules, but its jvp rule evaluates the function a second time. And
torch.func.grad always differentiates with create_graph=True, so it records the recomputation of an ordinary
backward again, and no memory is saved. Here the pull-back of a level leaves no record at its own level.
Peeling by hand follows torch._functorch.autograd_function.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from remat.transforms.compat import (
    functions_as_they_are,
    has_tangent,
    hooks_aside,
    in_forward_mode,
    in_transform,
    innermost_level,
    is_wrapped,
    level_of,
    restore_vmap,
    unwrap_if_dead,
    wrap_for_grad,
)
from remat.transforms.context import active, recomputing, scoped, untracked
from remat.transforms.errors import RematError, carried
from remat.transforms.pytree import smooth as pytree_smooth
from remat.transforms.region import Region
from remat.transforms.state import Ambient, in_backward, noting
from remat.transforms.tape import Recorded, Recorder

Tensors = Sequence[torch.Tensor]
Body = Callable[..., tuple[torch.Tensor, ...]]


class Residuals:
    """What the forward of one node leaves for its pull-back, besides the operands."""

    def __init__(self) -> None:
        self.recorded: Recorded | None = None
        self.differentiated = set[int]()  # the operands that this node or one of another level differentiates
        self.apart = set[int]()  # the levels of vmaps in which each example has run for itself
        self.written: Any = None  # in a traced graph: what its `World` noted in the forward


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
    # While a recorded forward runs: what is told its results, as the level that differentiates them has them.
    made: Callable[[Tensors], None] | None = None
    # The `Results` that every run of the function is to meet, where ops cannot be compared.
    results: Any = None
    present: Any = None  # while it is pulled back: that of the `Prim`
    steering: Any = None  # arguments that are no tensors
    meet: Callable[[], None] | None = None  # compares what ranks keep, in the first pull-back

    @property
    def by_levels(self) -> bool:
        """Whether plain autograd refuses the function."""
        return self.world is None and self.region.cache.by_levels


@dataclass(frozen=True)
class Prim:
    """A function of tensors to a tuple of tensors, ready to be called under any levels.

    Attributes:
        body: the function.
        recorded: the function as the nodes above want it recorded (see `as_differentiated`), None when none;
            of a pull-back only where ops are compared (`_compares`).
        family: what it shares with its relatives.
        pulls: whether this is a pull-back, which recomputes.
        residual_slots: forward only: where the recorded run leaves its residuals.
        source: pull-back only: the residuals to use.
        own_level: pull-back only: the functorch level whose backward this is, or None.
        present: pull-back only: the results of the region that have a cotangent, or None for all.
        cotangents: pull-back only: which of the operands are its cotangents.
        dual: whether tangents are computed along; then op sequences cannot be compared (`Tape.loose`).
        mapped: whether `body` is a batched or a dual form of the function.
        masks: forward only: the operands that each of the nodes above differentiates.
    """

    body: Body
    family: Family
    recorded: Body | None = None
    pulls: bool = False
    residual_slots: tuple[Residuals, ...] = ()
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


# -- the function as it is differentiated, and its pull-back ------------------------------------------------


def as_differentiated(body: Body, mask: list[int], family: Family, plainly: bool = False) -> Body:
    """`body`, run the way its pull-back will run it (torch picks other kernels where it differentiates);
    `plainly`: where no level is active, and as it is elsewhere."""

    def note(outs: Tensors) -> None:
        if family.made is not None:
            family.made(outs)

    def run(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        split: list[list[int]] = [[]]
        if plainly and (in_transform() or family.by_levels):
            return body(*operands)
        if not in_transform() and not family.by_levels:
            # A pull-back that runs this again differentiates some operands already, for good.
            around = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
            with torch.enable_grad(), unchanged(operands, mask, family):
                given = [operands[i] for i in mask]
                own = [t if around and t.requires_grad else _leaf(t) for t in given]
                outs = body(*merged(operands, mask, own))
            note(outs)
            return tuple(outs) if around else tuple([t.detach() for t in outs])

        def of(*moving: torch.Tensor) -> Any:
            with writable(operands, mask, family) as others:
                outs = body(*merged(others, mask, moving))
            note(outs)
            return smooth_first(outs, split)

        with hooks_aside():
            made: Any = torch.func.vjp(of, *[operands[i] for i in mask], has_aux=True)
        smooth, _, rest = made
        return tuple(reassemble(smooth, rest, split[0]))

    return run


@dataclass(frozen=True)
class PullBack:
    """(operands, cotangents of the outs at `present`) -> gradients of the operands at `mask`.

    `over` holds the vmaps that see cotangents only, from the innermost: there the function is recomputed
    once, outside, and only the pulling is batched. (jacrev is such a vmap.)
    """

    body: Body
    count: int
    mask: list[int]
    present: list[int]
    family: Family
    by_levels: bool = False
    around: bool = False  # whether levels below differentiate other operands, which torch looks at
    over: tuple[tuple[tuple[int | None, ...], int, str], ...] = ()
    leveled: str | None = None  # as `active.leveled` has it
    unused: set[int] = field(default_factory=set)  # places of `mask` that turned out not to matter

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        operands, cotangents = tensors[: self.count], tensors[self.count :]
        if not in_transform() and not self.by_levels:
            return self._plainly(operands, cotangents)
        split: list[list[int]] = [[]]

        def of(*moving: torch.Tensor) -> Any:
            with writable(operands, self.mask, self.family) as others:
                outs = self.body(*merged(others, self.mask, moving))
            # Only these: behind the others are values that nobody recomputed, and zero times NaN is NaN.
            made = smooth_first([outs[i] for i in self.present], split)
            return made if made[0] else ((moving[0].new_zeros(()),), ())

        moving = [operands[i] for i in self.mask]
        # A level takes over, for those below it, whether gradients are on.
        below = torch.enable_grad() if self.around else contextlib.nullcontext()
        with hooks_aside(), below:
            made, last = noting(lambda: torch.func.vjp(of, *moving, has_aux=True))
        smooth, vjp, _ = made
        forward_done()

        def pull(*cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = [cotangents[k] for k in split[0]] or [torch.zeros_like(t) for t in smooth]
            # Some ops (silu) have a backward for either; only the one for more derivatives has tangents.
            again = torch.is_grad_enabled() or in_forward_mode()
            with in_backward(last):
                return tuple(vjp(tuple(full), create_graph=again))

        return self._staged(pull)(*cotangents)

    def _plainly(self, operands: Tensors, cotangents: Tensors) -> tuple[torch.Tensor, ...]:
        """By plain autograd: quicker, and the only way for functions that torch.func refuses."""
        again = torch.is_grad_enabled() and any(t.requires_grad for t in (*operands, *cotangents))
        with (
            torch.enable_grad(),
            scoped(leveled=self.leveled and (self.leveled, again)),
            unchanged(operands, self.mask, self.family),
        ):
            leaves = [_variable(operands[i], again) for i in self.mask]
            outs, last = noting(self.body, *merged(operands, self.mask, leaves))
        forward_done()

        def pull(*cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
            pairs = [
                (outs[i], ct)
                for i, ct in zip(self.present, cotangents, strict=True)
                if outs[i].requires_grad and not cut_off(outs[i])
            ]
            grads: Any = [None] * len(leaves)
            if pairs:
                ends, cts = [o for o, _ in pairs], [ct for _, ct in pairs]
                with in_backward(last):
                    grads = torch.autograd.grad(
                        ends, leaves, cts, create_graph=again, retain_graph=again or None, allow_unused=True
                    )
            self.unused.update(i for i, g in enumerate(grads) if g is None)
            return tuple(
                [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]
            )

        return self._staged(pull)(*cotangents)

    def batched(self, in_dims: tuple[int | None, ...], size: int, randomness: str) -> PullBack | None:
        """The same under a vmap whose batch is in the cotangents only, None if it is in the operands too."""
        if any(dim is not None for dim in in_dims[: self.count]):
            return None
        return replace(self, over=(*self.over, (in_dims[self.count :], size, randomness)))

    def _staged(self, pull: Body) -> Body:
        for in_dims, size, randomness in self.over:
            pull = _batched_first(pull, in_dims, size, randomness)
        return pull


def forward_done() -> None:
    """The function has been recomputed, the backward begins."""
    if not active.replays:
        return
    replay, again = active.replays[-1]
    if replay is not None:
        replay.forward_done()
    again.close()


@contextlib.contextmanager
def replaying(replay: Any, region: str) -> Iterator[None]:
    """Hand out a forward's values (`replay` is a mode, or None) until the backward begins."""
    with contextlib.ExitStack() as until_end, contextlib.ExitStack() as again:
        again.callback(recomputing(region))
        if replay is not None:
            # What finds copies of written memory finds them in the backward, too.
            (until_end if replay.scratch else again).enter_context(replay)
        active.replays.append((replay, again))
        try:
            yield
        finally:
            active.replays.pop()


def _batched_first(pull: Body, in_dims: tuple[int | None, ...], size: int, randomness: str) -> Body:
    """`pull` over a batch of cotangents; every result has the batch in front."""

    def run(*cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs, dims = restore_vmap(lambda *ts: tuple(pull(*ts)), in_dims, size, randomness)(*cotangents)
        pairs = zip(outs, dims, strict=True)
        return tuple([t.expand(size, *t.shape) if d is None else t.movedim(d, 0) for t, d in pairs])

    return run


def _variable(tensor: torch.Tensor, again: bool) -> torch.Tensor:
    # An alias each, so that one tensor passed twice gets two gradients.
    return torch.ops.aten.alias.default(tensor) if again and tensor.requires_grad else _leaf(tensor)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def apart(recorder: Recorder, operands: Tensors, at: set[int]) -> list[torch.Tensor]:
    """Other objects in the place of the operands at `at`: an op that meets the tensor itself has it from
    elsewhere, with no derivative. Regions around know aliases by what they are of."""
    given, first = list(operands), dict[int, int]()
    for i, tensor in enumerate(operands):
        first.setdefault(id(tensor), i)
    for i in at:
        # A write to the tensor, as of `Embedding(max_norm)`, would spoil a view made without gradients.
        with torch.enable_grad():
            given[i] = torch.ops.aten.alias.default(operands[i])
        recorder.replaced_by(given[i], operands[i], -1 - first[id(operands[i])])
    replaced = {id(operands[i]) for i in at}
    for i, operand in enumerate(operands):
        # Passed without a derivative as well, the tensor itself is that operand.
        if i not in at and id(operand) in replaced:
            recorder.bind(operand, -1 - i)
    return given


def merged(operands: Tensors, at: list[int], replaced: Tensors) -> list[torch.Tensor]:
    """The operands with others at these positions."""
    merged = list(operands)
    for i, tensor in zip(at, replaced, strict=True):
        merged[i] = tensor
    return merged


def smooth_first(
    outs: Tensors, split: list[list[int]]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Differentiable results and the others; torch.func takes only the former, the others go as auxiliary."""
    smooth = [pytree_smooth(t) and not cut_off(t) for t in outs]
    split[0] = [i for i, is_smooth in enumerate(smooth) if is_smooth]
    return tuple(itertools.compress(outs, smooth)), tuple(
        [t for t, s in zip(outs, smooth, strict=True) if not s]
    )


def reassemble(smooth: Tensors, rest: Tensors, at: list[int]) -> list[torch.Tensor]:
    """The results in their own order: what `smooth_first` split; `at` says where the smooth ones go."""
    outs = list(rest)
    for i, tensor in zip(at, smooth, strict=True):
        outs.insert(i, tensor)
    return outs


@contextlib.contextmanager
def unchanged(operands: Tensors, but: Sequence[int], family: Family) -> Iterator[None]:
    """Within, a function may write to operands, those at `but` aside, what has no derivative here: below its
    levels a derivative is lost to who reads the operand later."""
    if family.world is not None:  # which looks for itself
        yield
        return
    with functions_as_they_are():
        before = [i for i, t in enumerate(operands) if i not in but and not _carries(t)]
    yield
    with functions_as_they_are():
        written = [operands[i] for i in before if _carries(operands[i])]
    for tensor in written:
        if not is_wrapped(tensor) and tensor.requires_grad:
            untracked(tensor.detach_)  # the user's own tensor
    if written:
        raise RematError(carried(family.region.name))


@contextlib.contextmanager
def writable(operands: Tensors, but: Sequence[int], family: Family) -> Iterator[Tensors]:
    """The operands as arguments of the innermost level, which refuses writes to what it takes for captured;
    those at `but` are given by who differentiates them.

    Only where the function was seen to write to one: a wrapper outlives its level in what autograd saves.
    """
    if family.world is not None or not family.region.cache.writes_operands:
        yield operands
        return
    level = innermost_level().level()
    with functions_as_they_are():
        given = [
            t if i in but or level_of(t) >= level else wrap_for_grad(t, level) for i, t in enumerate(operands)
        ]
    with unchanged(given, but, family):
        yield given


def _carries(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or (in_forward_mode() and untracked(has_tangent, tensor))


def cut_off(tensor: torch.Tensor) -> bool:
    """Whether this is a view made with gradients off: torch says that it requires them, as its base does, and
    fails where it is differentiated."""
    with functions_as_they_are():
        return tensor.requires_grad and tensor.grad_fn is None and tensor._base is not None
