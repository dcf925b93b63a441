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

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad

from remat.transforms.compat import (
    GRAD,
    JVP,
    VMAP,
    SingleLevelFunction,
    add_batch_dim,
    cut_off,
    dual_level_known,
    enable_single_level_autograd_function,
    forward_grad_enabled,
    graph_kept,
    hooks_aside,
    in_transform,
    interpreter,
    is_batched,
    is_dead,
    is_wrapped,
    level_of,
    next_node,
    restore_vmap,
    unwrap_batched,
    unwrap_for_grad,
    unwrap_if_dead,
    unwrap_once,
    unwrapped,
    wrap_for_grad,
)
from remat.transforms.context import inside, quiet
from remat.transforms.errors import RematError
from remat.transforms.placeholders import hollow as placeholders_hollow
from remat.transforms.placeholders import metadata
from remat.transforms.pytree import smooth as pytree_smooth
from remat.transforms.region import Region, recomputing
from remat.transforms.state import Ambient, RandomState
from remat.transforms.tape import (
    Ends,
    Kept,
    Replay,
    Trace,
    held_tensors,
    holds_unseen,
    listening,
    report,
    storage,
)

Tensors = Sequence[torch.Tensor]
Body = Callable[..., tuple[torch.Tensor, ...]]


class Residuals:
    """What the forward of one node leaves for its pull-back, besides the operands."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self.random: RandomState | None = None
        self.outside: set[int] | None = None  # storages from outside that autograd itself reads
        self.written: Any = None  # in a traced graph: what its `World` noted in the forward
        self.ends: Ends | None = None  # the results, where they do not all need the same values
        self.packed: list[tuple[int, int]] = []  # (op that made a value, autograd node that saved it)

    def part(self, present: Sequence[int] | None) -> tuple[set[int], int] | None:
        """What of the trace a pull-back from the results at `present` needs; None for all of it."""
        if self.ends is None or self.trace is None or present is None:
            return None
        idle = self.ends.idle_without(present)
        return self.trace.part({made for made, owner in self.packed if owner not in idle}) if idle else None

    def needs(self, tensor: torch.Tensor) -> bool:
        """Whether the pull-back reads this operand."""
        if self.trace is None or self.outside is None or self.trace.opaque:
            return True
        bottom = unwrapped(tensor)
        return self.trace.reads(bottom) or storage(bottom) in self.outside


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
        recorded: the function as the nodes above want it recorded (see `_as_differentiated`), None when none;
            of a pull-back only where ops are compared (`_compares`).
        family: what it shares with its relatives.
        pulls: whether this is a pull-back, which recomputes.
        sinks: forward only: where the recorded run leaves its residuals.
        source: pull-back only: the residuals to use.
        own_level: pull-back only: the functorch level whose backward this is, or None.
        present: pull-back only: the results of the region that have a cotangent, or None for all.
        cotangents: pull-back only: which of the operands are its cotangents.
        dual: whether tangents are computed along; then op sequences cannot be compared (`Trace.loose`).
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


def call(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run `prim` under whatever functorch levels are active."""
    operands = [unwrap_if_dead(t) for t in operands]
    level = interpreter()
    if level is None:
        return _at_bottom(prim, operands)
    rule = _RULES.get(level.key())
    if rule is None:
        # torch.func.functionalize: nothing to save there, the function runs as it is.
        return tuple(prim.body(*operands))
    return rule(level, prim, operands)


def _at_bottom(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return _BottomNode.apply(prim, *operands)
    return _execute(prim, operands)


# -- rules --------------------------------------------------------------------------------------------


def _grad_rule(level: Any, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    number = level.level()
    tracked = torch.is_grad_enabled() and any(_tracked(t, number) for t in operands)
    if not tracked:
        with level.lower():
            outs = call(prim, [unwrap_for_grad(t, number) for t in operands])
        return tuple([wrap_for_grad(t, number) for t in outs])
    node = _LevelPull if prim.own_level == number else _LevelNode
    # A dual number of a level below, if not wrapped, would be taken for one of this level's.
    operands = [t if level_of(t) == number else wrap_for_grad(t, number) for t in operands]
    with enable_single_level_autograd_function():
        return node.apply(prim, level, *operands)  # pyright: ignore[reportAttributeAccessIssue]


def _tracked(tensor: torch.Tensor, level: int) -> bool:
    return level_of(tensor) == level and tensor.requires_grad


def _vmap_rule(level: Any, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    number = level.level()
    pairs = [unwrap_batched(t, number) for t in operands]
    in_dims = tuple([dim for _, dim in pairs])
    lowered = [t for t, _ in pairs]
    randomness = level.randomness()
    if randomness != "different" and all(dim is None for dim in in_dims):
        with level.lower():
            return call(prim, lowered)
    out_dims: list[Any] = []
    size = level.batch_size()

    def batched(body: Body) -> Body:
        if isinstance(body, PullBack) and (pull := body.batched(in_dims, size, randomness)) is not None:
            out_dims[:] = [0] * len(body.mask)
            return pull
        over = restore_vmap(lambda *ts: tuple(body(*ts)), in_dims, size, randomness)

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs, dims = over(*tensors)
            out_dims[:] = dims
            return tuple(outs)

        return run

    with level.lower():
        outs = call(_mapped(prim, batched), lowered)
    return tuple(
        [t if d is None else add_batch_dim(t, d, number) for t, d in zip(outs, out_dims, strict=True)]
    )


def _jvp_rule(level: Any, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    number = level.level()
    duals = [forward_ad.unpack_dual(t) if level_of(t) == number else (t, None) for t in operands]
    primals = [unwrap_for_grad(p, number) for p, _ in duals]
    at = [i for i, (_, t) in enumerate(duals) if t is not None]
    tangents = [unwrap_for_grad(t, number) for _, t in duals if t is not None]
    if not at:
        with level.lower():
            outs = call(prim, primals)
        return tuple([wrap_for_grad(t, number) for t in outs])
    split: list[list[int]] = [[]]
    with level.lower():
        dual = _mapped(prim, lambda body: _with_tangents(body, len(primals), at, split))
        outs = call(replace(dual, dual=True), [*primals, *tangents])
    smooth = split[0]
    plain = len(outs) - len(smooth)
    made = [wrap_for_grad(t, number) for t in outs[:plain]]
    for i, tangent in zip(smooth, outs[plain:], strict=True):
        made[i] = forward_ad.make_dual(_writable(made[i]), wrap_for_grad(tangent, number))
    return tuple(made)


def _writable(primal: torch.Tensor) -> torch.Tensor:
    """`primal`, or a copy where its elements share memory: torch gives a tangent the layout of its primal."""
    overlaps = any(step == 0 and size > 1 for step, size in zip(primal.stride(), primal.shape, strict=True))
    return primal.clone(memory_format=torch.contiguous_format) if overlaps else primal


def _with_tangents(body: Body, count: int, at: list[int], split: list[list[int]]) -> Body:
    """(primals, tangents of those at `at`) -> (outs, tangents of the floating-point outs)."""

    def dual(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        primals, tangents = tensors[:count], tensors[count:]

        def of(*moving: torch.Tensor) -> Any:
            return _smooth_first(body(*_merged(primals, at, moving)), split)

        with hooks_aside():
            # torch's stub gives the result two possible lengths.
            made: Any = torch.func.jvp(of, tuple(primals[i] for i in at), tuple(tangents), has_aux=True)
        smooth, out_tangents, rest = made
        return (*_reassemble(smooth, rest, split[0]), *out_tangents)

    return dual


def _mapped(prim: Prim, transform: Callable[[Body], Body]) -> Prim:
    recorded = transform(prim.recorded) if prim.recorded is not None else None
    return replace(prim, body=transform(prim.body), recorded=recorded, mapped=True)


def _known_jvp_rule(level: Any, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    with dual_level_known():
        return _jvp_rule(level, prim, operands)


_RULES = {GRAD: _grad_rule, VMAP: _vmap_rule, JVP: _known_jvp_rule}


# -- nodes --------------------------------------------------------------------------------------------


def _keep(ctx: Any, prim: Prim, operands: Tensors, outs: Tensors, residuals: Residuals | None) -> None:
    """Put on a node what its backward needs."""
    ctx.prim, ctx.residuals = prim, residuals
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*[t for t in outs if not pytree_smooth(t)])
    needed = [residuals is None or residuals.needs(t) or _tracked_below(t) for t in operands]
    if prim.family.world is not None:
        needed = [True] * len(operands)
    ctx.save_for_backward(*[t if keep else _hollow(t) for t, keep in zip(operands, needed, strict=True)])


def _tracked_below(tensor: torch.Tensor) -> bool:
    """Whether a lower level differentiates `tensor` too: its place in that graph must then be kept."""
    while is_wrapped(tensor):
        tensor = unwrap_once(tensor)
        if tensor.requires_grad:
            return True
    return tensor.requires_grad


def _recorded(prim: Prim, mask: list[int]) -> tuple[Prim, Residuals | None]:
    """The primitive to run in the forward of a node that differentiates the operands at `mask`."""
    if prim.pulls and not _compares(prim):
        return prim, None
    recorded = _as_differentiated(prim.recorded or prim.body, mask, prim.family)
    if prim.pulls:
        return replace(prim, recorded=recorded), None
    residuals = Residuals()
    masks = (*prim.masks, tuple(mask))
    return replace(prim, recorded=recorded, sinks=(*prim.sinks, residuals), masks=masks), residuals


def _backward(ctx: Any, cotangents: tuple[Any, ...], level: int | None) -> list[Any]:
    grads: list[Any] = [None] * len(ctx.needs_input_grad)
    saved = _saved(ctx)
    first = len(grads) - len(saved)
    mask = [i for i in range(len(saved)) if ctx.needs_input_grad[first + i]]
    present = [i for i, ct in enumerate(cotangents) if ct is not None]
    if not mask or not present:
        return grads
    dead = level is not None and any(is_dead(t) for t in saved)
    # A pull-back of a pull-back recomputes the same forward, so the same residuals serve.
    source = ctx.residuals or ctx.prim.source
    recorded = ctx.prim.recorded if _compares(replace(ctx.prim, source=source)) else None
    body = PullBack(recorded or ctx.prim.body, len(saved), mask, present)
    # A second derivative still pulls back from the same results of the region.
    ends = ctx.prim.present if ctx.prim.pulls else tuple(present)
    own = None if dead else level
    pull = Prim(body, ctx.prim.family, pulls=True, source=source, own_level=own, present=ends)
    pull = replace(pull, cotangents=(len(saved), len(saved) + len(present)))
    made = call(pull, [*saved, *[cotangents[i] for i in present]])
    if ctx.residuals is not None and not graph_kept():
        # Freed as the backward goes, like autograd's own saved values.
        ctx.residuals = Residuals() if ctx.residuals.trace is None else None
        ctx.prim = replace(ctx.prim, body=_freed)
    for place, (i, grad) in enumerate(zip(mask, made, strict=True)):
        # No gradient is None in plain autograd; torch.func wants zeros.
        grads[first + i] = None if level is None and place in body.unused else grad
    return grads


def _saved(ctx: Any) -> Tensors:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        name = ctx.prim.family.region.name
        raise RematError(
            f"region {name!r}: an argument or captured tensor was written in place: {error}"
        ) from error


def _compares(prim: Prim) -> bool:
    """Whether a recomputation must run ops just as the forward did, by the same levels, those that it is not
    pulled back for included: in a graph, where kept values are told apart by what comes before them. (By
    which levels differentiate what, matmul and in-place ops on views come down to other ops.)"""
    written = None if prim.source is None else prim.source.written
    return written is not None and written.keeps and not written.trace.loose


def _freed(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
    raise RematError("a region's backward ran a second time; say retain_graph=True in the first")


class _BottomNode(torch.autograd.Function):
    """A node of plain autograd, for regions called below functorch levels."""

    @staticmethod
    def forward(ctx: Any, prim: Prim, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask = [i for i, t in enumerate(operands) if t.requires_grad]
        run, residuals = _recorded(prim, mask)
        outs = _execute(run, operands)
        _keep(ctx, prim, operands, outs, residuals)
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return tuple(_backward(ctx, cotangents, None))


class _LevelNode(SingleLevelFunction):
    """A node at one functorch grad level."""

    @staticmethod
    def forward(ctx: Any, prim: Prim, level: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        number = level.level()
        ctx.level = number
        mask = [i for i, t in enumerate(operands) if _tracked(t, number)]
        run, residuals = _recorded(prim, mask)
        outs = _lowered(level, run, operands)
        _keep(ctx, prim, operands, outs, residuals)
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return tuple(_backward(ctx, cotangents, ctx.level))


class _LevelPull(SingleLevelFunction):
    """The pull-back at the level it belongs to: it keeps nothing, and is never differentiated there."""

    @staticmethod
    def forward(ctx: Any, prim: Prim, level: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.name = prim.family.region.name
        return _lowered(level, prim, operands)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RematError(
            f"region {ctx.name!r} is differentiated twice at one level of torch.func (torch.autograd.grad "
            "inside a torch.func transform). Nest the transforms instead: torch.func.grad of a function "
            "that calls torch.func.grad."
        )


def _lowered(level: Any, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    number = level.level()
    lowered = [unwrap_for_grad(t, number) for t in operands]
    # autograd.Function switches both kinds of derivative off; the levels below want theirs.
    with torch.enable_grad(), forward_grad_enabled(True), level.lower():
        outs = call(prim, lowered)
    return tuple([wrap_for_grad(t, number) for t in outs])


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with the same wrappers and metadata, and no memory: for operands that no backward reads."""
    if is_wrapped(tensor):
        level = level_of(tensor)
        if is_batched(tensor):
            inner, dim = unwrap_batched(tensor, level)
            return add_batch_dim(_hollow(inner), dim, level)
        return wrap_for_grad(_hollow(unwrap_once(tensor)), level)
    # A factory's result is wrapped by the level at hand.
    empty = unwrapped(quiet(placeholders_hollow, metadata(tensor)))
    empty.untyped_storage().resize_(0)
    return empty


@contextlib.contextmanager
def _filled(operands: Tensors) -> Any:
    """Give hollow operands memory (of any content) for as long as the function runs: it may look, it must
    not crash."""
    hollow = [t for t in operands if t.numel() and _storage_bytes(t) == 0]
    for tensor in hollow:
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        tensor.untyped_storage().resize_((last + 1) * tensor.element_size())
    try:
        yield
    finally:
        for tensor in hollow:
            tensor.untyped_storage().resize_(0)


def _storage_bytes(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 1


# -- bodies -------------------------------------------------------------------------------------------


def _as_differentiated(body: Body, mask: list[int], family: Family) -> Body:
    """`body`, run the way its pull-back will run it (torch picks other kernels where it differentiates)."""

    def note(outs: Tensors) -> None:
        if family.made is not None:
            family.made(outs)

    def run(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        split: list[list[int]] = [[]]
        if not in_transform():
            # A pull-back that runs this again differentiates some operands already, for good.
            around = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
            with torch.enable_grad():
                given = [operands[i] for i in mask]
                own = [t if around and t.requires_grad else _leaf(t) for t in given]
                outs = body(*_merged(operands, mask, own))
            note(outs)
            return tuple(outs) if around else tuple([t.detach() for t in outs])

        def of(*moving: torch.Tensor) -> Any:
            outs = body(*_merged(operands, mask, moving))
            note(outs)
            return _smooth_first(outs, split)

        with hooks_aside():
            made: Any = torch.func.vjp(of, *[operands[i] for i in mask], has_aux=True)
        smooth, _, rest = made
        return tuple(_reassemble(smooth, rest, split[0]))

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
    over: tuple[tuple[tuple[int | None, ...], int, str], ...] = ()
    unused: set[int] = field(default_factory=set)  # places of `mask` that turned out not to matter

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        operands, cotangents = tensors[: self.count], tensors[self.count :]
        if not in_transform():
            return self._plainly(operands, cotangents)
        split: list[list[int]] = [[]]

        def of(*moving: torch.Tensor) -> Any:
            return _smooth_first(self.body(*_merged(operands, self.mask, moving)), split)

        with hooks_aside():
            made: Any = torch.func.vjp(of, *[operands[i] for i in self.mask], has_aux=True)
        smooth, vjp, _ = made
        _forward_done()

        def pull(*cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = dict(zip(self.present, cotangents, strict=True))
            full = [
                given[i] if i in given else torch.zeros_like(t) for i, t in zip(split[0], smooth, strict=True)
            ]
            return tuple(vjp(tuple(full)))

        return self._staged(pull)(*cotangents)

    def _plainly(self, operands: Tensors, cotangents: Tensors) -> tuple[torch.Tensor, ...]:
        """By plain autograd: quicker, and the only way for functions that torch.func refuses."""
        again = torch.is_grad_enabled() and any(t.requires_grad for t in (*operands, *cotangents))
        with torch.enable_grad():
            leaves = [_variable(operands[i], again) for i in self.mask]
            outs = self.body(*_merged(operands, self.mask, leaves))
        _forward_done()

        def pull(*cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
            pairs = [
                (outs[i], ct)
                for i, ct in zip(self.present, cotangents, strict=True)
                if outs[i].requires_grad and not cut_off(outs[i])
            ]
            if not pairs:
                return tuple([torch.zeros_like(t) for t in leaves])
            ends, cts = [o for o, _ in pairs], [ct for _, ct in pairs]
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


_replays = threading.local()


def _forward_done() -> None:
    """The function has been recomputed, the backward begins."""
    if not getattr(_replays, "stack", None):
        return
    replay, again = _replays.stack[-1]
    again.close()
    if replay is not None:
        replay.forward_done()


@contextlib.contextmanager
def replaying(replay: Any, region: str) -> Iterator[None]:
    """Hand out a forward's values (`replay` is a mode, or None) until the backward begins."""
    stack = _replays.__dict__.setdefault("stack", [])
    with contextlib.ExitStack() as again:
        again.callback(recomputing(region))
        stack.append((replay, again))
        try:
            with replay if replay is not None else contextlib.nullcontext():
                yield
        finally:
            stack.pop()


def _batched_first(pull: Body, in_dims: tuple[int | None, ...], size: int, randomness: str) -> Body:
    """`pull` over a batch of cotangents; every result has the batch in front."""

    def run(*cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs, dims = restore_vmap(lambda *ts: tuple(pull(*ts)), in_dims, size, randomness)(*cotangents)
        pairs = zip(outs, dims, strict=True)
        return tuple([t.expand(size, *t.shape) if d is None else t.movedim(d, 0) for t, d in pairs])

    return run


def _variable(tensor: torch.Tensor, again: bool) -> torch.Tensor:
    # An alias each, so that one tensor passed twice gets two gradients.
    return quiet(tensor.view_as, tensor) if again and tensor.requires_grad else _leaf(tensor)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def _merged(operands: Tensors, at: list[int], replaced: Tensors) -> list[torch.Tensor]:
    merged = list(operands)
    for i, tensor in zip(at, replaced, strict=True):
        merged[i] = tensor
    return merged


def _smooth_first(
    outs: Tensors, split: list[list[int]]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Differentiable results and the others; torch.func takes only the former, the others go as auxiliary."""
    smooth = [pytree_smooth(t) and not cut_off(t) for t in outs]
    split[0] = [i for i, is_smooth in enumerate(smooth) if is_smooth]
    return tuple(itertools.compress(outs, smooth)), tuple(
        [t for t, s in zip(outs, smooth, strict=True) if not s]
    )


def _reassemble(smooth: Tensors, rest: Tensors, at: list[int]) -> list[torch.Tensor]:
    outs = list(rest)
    for i, tensor in zip(at, smooth, strict=True):
        outs.insert(i, tensor)
    return outs


# -- running ------------------------------------------------------------------------------------------


def _execute(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run a primitive's body below every level."""
    world = prim.family.world
    if prim.pulls:
        return _execute_pull(prim, operands) if world is None else world.pull(prim, operands)
    with inside():
        if world is not None:
            outs = world.forward(prim, operands)
        else:
            outs = _execute_recorded(prim, operands) if prim.sinks else prim.body(*operands)
    # A result that is an operand itself would be taken for an in-place result by autograd.Function.
    taken = {id(t) for t in operands}
    return tuple([quiet(t.view_as, t) if id(t) in taken else t for t in outs])


def _execute_recorded(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    region, family = prim.family.region, prim.family
    trace = Trace(region.name)
    trace.loose = prim.dual
    selector = region.selector() if region.selector else None
    record = region.record(trace, selector, operands)
    random = RandomState(operands) if region.preserve_rng_state else None
    outside: set[int] = set()
    packed: list[tuple[int, int]] = []
    ends: list[Ends] = []
    unseen: list[bool] = []
    start = next_node()

    def watch(tensor: torch.Tensor) -> None:
        bottom = unwrapped(tensor)
        found = record.find(bottom)
        if record.origin(bottom) is None:
            outside.add(storage(bottom))
        if found is not None:
            packed.extend((source, next_node() - 1) for source in record.sources(found))

    def note(outs: Tensors) -> None:
        unseen.append(holds_unseen(outs, start))
        if len(outs) > 1:
            ends.append(Ends(outs, start))

    family.watch, family.made = watch, note
    try:
        with selector.watching(levels=True) if selector else contextlib.nullcontext(), record:
            outs = (prim.recorded or prim.body)(*operands)
    finally:
        watched = family.watch is not None and not any(unseen)
        family.watch, family.made = None, None
    trace.settle({made for made, _ in packed} if watched else None)
    trace.finish(record, [unwrapped(t) for t in outs])
    if watched:
        trace.also_reads(outside)
    for sink in prim.sinks:
        sink.trace, sink.random, sink.outside = trace, random, outside if watched else None
        # Of several levels that differentiate, each has its own graph: then all is needed.
        if watched and len(ends) == 1 and ends[0].differ:
            sink.ends, sink.packed = ends[0], packed
    if selector:
        selector.finished(trace)
    if listening():
        _report(region.name, trace, prim.sinks[-1], operands)
    return outs


def _report(name: str, trace: Trace, sink: Residuals, operands: Tensors) -> None:
    for i, tensor in enumerate(operands):
        if sink.needs(tensor):
            report(Kept("argument", tensor, name, i))
    for at, node in enumerate(trace.nodes):
        for tensor, away in held_tensors(node.kept):
            report(Kept("policy", tensor, name, at, node.op, node.name, away))


def _execute_pull(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    family, source = prim.family, prim.source
    with contextlib.ExitStack() as stack:
        stack.enter_context(_filled(operands))
        if family.ambient.must_be_restored():
            stack.enter_context(family.ambient.restored())
        if source is not None and source.random is not None:
            stack.callback(source.random.again().restore)
            source.random.restore()
        if source is not None and source.trace is not None and source.trace.generators:
            stack.enter_context(source.trace.generators_rewound())
        replay = None
        if source is not None and source.trace is not None:
            source.trace.check_unwritten(family.region.function)
        if source is not None and source.trace is not None and not source.trace.loose:
            check = family.region.determinism_check != "none"
            part = source.part(prim.present)
            digest = family.region.digest
            stack.enter_context(source.trace.fetched(part))
            replay = Replay(source.trace, early_stop=False, check=check, digest=digest, part=part)
        stack.enter_context(replaying(replay, family.region.name))
        return tuple(prim.body(*operands))
