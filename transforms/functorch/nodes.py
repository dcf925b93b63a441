"""Where a primitive is differentiated: the rules of plain autograd and of a grad level, and their nodes. Also
how it runs below every level: the recorded forward, and its recomputation in a pull-back.

A node holds the operands and what the recorded forward left (`Residuals`); its backward calls the pull-back,
which is a primitive again.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch

from remat.transforms.closure import Missed, made_inside, read_again, refuse_strays
from remat.transforms.compat import (
    GRAD,
    SingleLevelFunction,
    data_of,
    enable_single_level_autograd_function,
    forward_ad_active,
    forward_grad_enabled,
    graph_kept,
    is_dead,
    is_wrapped,
    level_of,
    next_node,
    ordinary,
    outside_inference,
    saved_by,
    uncompiled,
    uncompiled_calls,
    unwrap_for_grad,
    unwrapped,
    wrap_for_grad,
)
from remat.transforms.context import (
    active,
    inside,
    node_of,
    on_scratch,
    ranks_met,
    selective_around,
    untracked,
)
from remat.transforms.errors import RematError
from remat.transforms.functorch.primitive import (
    Prim,
    PullBack,
    Residuals,
    Tensors,
    apart,
    as_differentiated,
    call,
    replaying,
    rule,
)
from remat.transforms.functorch.results import Results, compared
from remat.transforms.functorch.rules import plain_duals, rewrapped
from remat.transforms.offload import held_tensors
from remat.transforms.ops import lies, storage
from remat.transforms.state import RandomState, held_states, noting, users_aside
from remat.transforms.tape import (
    Kept,
    Recorded,
    Recorder,
    Tape,
    TraceFollower,
    WriteNotes,
    held_values,
    nodes_behind,
    report,
)


@rule(None)
def at_bottom(_: None, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """The rule below all levels: a node of plain autograd where an operand requires gradients."""
    if forward_ad_active(operands):
        return plain_duals(prim, operands)
    if not outside_inference():
        # Below a level plain autograd records nothing there. The ops are those that run outside of inference
        # mode, in forward and pull-back alike.
        with torch.inference_mode(False), torch.no_grad():
            return _run(prim, untracked(ordinary, operands, True))
    if any([t.is_inference() for t in operands]):
        operands = untracked(ordinary, operands)
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return _bottom_node(prim, operands)
    return _run(prim, operands)


def _bottom_node(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    run, residuals = _recorded(prim, [i for i, t in enumerate(operands) if t.requires_grad])
    # As in the forward of an autograd.Function; but it may push tangents itself.
    with torch.no_grad(), forward_grad_enabled(True):
        outs = _run(run, operands)
    return BottomNode.apply(prim, outs, residuals, *_but_unread(prim, residuals, operands, outs))


def _but_unread(prim: Prim, residuals: Residuals | None, operands: Tensors, outs: Tensors) -> Tensors:
    """The operands, those apart from their graphs that no op has read.

    They were found, and may be of another step (`self.last`): a backward would be led into its graph, which
    may be freed.
    """
    source = residuals or prim.source
    if source is None or source.recorded is None or all(t.is_leaf or not t.requires_grad for t in operands):
        return operands
    tape = source.recorded.tape
    count = 0 if prim.pulls and prim.dual else tape.arguments  # (tangents come after cotangents there)
    read = {tape.outside[at].root for node in tape.nodes for at in node.external}
    leaving = {storage(t) for t in outs}
    given = list(operands)
    for i, (tensor, known) in enumerate(zip(operands[:count], tape.outside, strict=False)):
        if not tensor.is_leaf and known.root not in read and storage(tensor) not in leaving:
            given[i] = untracked(tensor.detach)
    return tuple(given)


@rule(GRAD)
def grad_rule(level: Any, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """The rule of a level of `grad`: a node of its own where the level differentiates an operand."""
    number = level.level()
    if not (torch.is_grad_enabled() and any(tracked(t, number) for t in operands)):
        with level.lower():
            outs = call(prim, [unwrap_for_grad(t, number) for t in operands])
        return tuple([wrap_for_grad(t, number) for t in outs])
    node = LevelPull if prim.own_level == number else LevelNode
    # A dual number of a level below, if not wrapped, would be taken for one of this level's.
    operands = [t if level_of(t) == number else wrap_for_grad(t, number) for t in operands]
    made_inside(operands)  # as no torch call has told a region or a scan around
    with enable_single_level_autograd_function():
        return node.apply(prim, level, *operands)  # pyright: ignore[reportAttributeAccessIssue]


def _run(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run a primitive's body, in eager or where else its family lives."""
    world = prim.family.world
    with uncompiled_calls() if world is None else contextlib.nullcontext():
        if prim.pulls:
            return _pull(prim, operands) if world is None else world.pull(prim, operands)
        with inside():
            outs = _forward(prim, operands) if world is None else world.forward(prim, operands)
    # A result that is an operand itself would be taken for an in-place result by autograd.Function.
    taken = {id(t) for t in operands}
    return tuple([torch.ops.aten.alias.default(t) if id(t) in taken else t for t in outs])


def _keep(ctx: Any, prim: Prim, operands: Tensors, outs: Tensors, residuals: Residuals | None) -> None:
    """Put on a node what its backward needs."""
    ctx.prim, ctx.residuals, ctx.leveled = prim, residuals, active.leveled and active.leveled[0]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*[t for t in outs if not (t.is_floating_point() or t.is_complex())])
    if prim.family.world is not None:
        # What the region wrote to may be written to again.
        written = {} if residuals is None else residuals.written.replaced
        ctx.save_for_backward(*[t if is_wrapped(t) else written.get(i, t) for i, t in enumerate(operands)])
        return
    # What the region wrote to may be written to again: a snapshot has what it was before.
    source = residuals or prim.source
    written = () if source is None or source.recorded is None else source.recorded.written
    ctx.apart = {i: rewrapped(operands[i], _unversioned) for i in written if i < len(operands)}
    ctx.save_for_backward(*[t for i, t in enumerate(operands) if i not in ctx.apart])


def _unversioned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, whose later writes nobody counts; levels wrap what an attribute returns."""
    return unwrapped(data_of(tensor))


def _recorded(prim: Prim, mask: list[int]) -> tuple[Prim, Residuals | None]:
    """The primitive to run in the forward of a node that differentiates the operands at `mask`."""
    if prim.pulls and not _compares(prim):
        return prim, None
    recorded = as_differentiated(prim.recorded or prim.body, mask, prim.family)
    if prim.pulls:
        return replace(prim, recorded=recorded), None
    residuals = Residuals()
    masks, residual_slots = (*prim.masks, tuple(mask)), (*prim.residual_slots, residuals)
    for slot in residual_slots:
        slot.differentiated.update(*masks)
    return replace(prim, recorded=recorded, residual_slots=residual_slots, masks=masks), residuals


def _backward(ctx: Any, cotangents: tuple[Any, ...], level: int | None) -> list[Any]:
    if ctx.prim.family.world is not None:
        return _pulled_back(ctx, cotangents, level)
    with users_aside():
        return _pulled_back(ctx, cotangents, level)


@uncompiled
def _pulled_back(ctx: Any, cotangents: tuple[Any, ...], level: int | None) -> list[Any]:
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
    forward = _as_recorded(replace(ctx.prim, source=source), mask)
    around = source is not None and not source.differentiated.issubset(mask)
    levels = ctx.prim.family.by_levels
    leveled = "inner" if ctx.prim.masks else ctx.leveled if level is None else "own"
    ctx.leveled = ctx.leveled and "inner"  # the levels around come here later
    body = PullBack(forward, len(saved), mask, present, ctx.prim.family, levels, around, leveled=leveled)
    # A second derivative still pulls back from the same results of the region.
    ends = ctx.prim.present if ctx.prim.pulls else tuple(present)
    own = None if dead else level
    pull = Prim(body, ctx.prim.family, pulls=True, source=source, own_level=own, present=ends)
    pull = replace(pull, cotangents=(len(saved), len(saved) + len(present)))
    made = call(pull, [*saved, *[cotangents[i] for i in present]])
    if ctx.residuals is not None and not graph_kept():
        # Freed as the backward goes, like autograd's own saved values.
        ctx.residuals = Residuals() if ctx.residuals.recorded is None else None
        ctx.prim, ctx.apart = replace(ctx.prim, body=_freed), {}
    for place, (i, grad) in enumerate(zip(mask, made, strict=True)):
        # Nothing goes on to where no gradient is.
        grads[first + i] = None if place in body.unused else grad
    return grads


def _saved(ctx: Any) -> Tensors:
    try:
        saved = ctx.saved_tensors
        if ctx.prim.body is _freed:
            _freed()
        if not (apart := getattr(ctx, "apart", None)):
            return saved
        others = iter(saved)
        return [apart[i] if i in apart else next(others) for i in range(len(saved) + len(apart))]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        name = ctx.prim.family.region.name
        raise RematError(
            f"region {name!r}: an argument or captured tensor was written in place: {error}"
        ) from error


def _as_recorded(prim: Prim, mask: list[int]) -> Any:
    """The function, with what the forward differentiated in it and this pull-back does not: matmul comes down
    to other ops where its operands require gradients.

    It asks at the innermost level, where those count that nodes inside this one have differentiated. Below
    all levels there is but one graph, and all nodes count.
    """
    source, recorded = prim.source, prim.recorded
    if recorded is not None and _compares(prim):
        return recorded
    if prim.pulls or source is None or source.recorded is None or source.recorded.tape.loose:
        return prim.body
    others = sorted(source.differentiated.difference(mask))
    body = recorded or prim.body
    return as_differentiated(body, others, prim.family, plainly=True) if others else body


def _compares(prim: Prim) -> bool:
    """Whether a recomputation must run its ops at the same levels as the forward, including levels that it is
    not pulled back for. That is so in a graph, where the nodes before a kept value tell it from others. (By
    which levels differentiate what, matmul and in-place ops on views come down to other ops.)
    """
    written = None if prim.source is None else prim.source.written
    return written is not None and written.keeps and not written.tape.loose


def _freed(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
    raise RematError("a region's backward ran a second time; say retain_graph=True in the first")


def tracked(tensor: torch.Tensor, level: int) -> bool:
    """Whether this level of `grad` differentiates a tensor."""
    return level_of(tensor) == level and tensor.requires_grad


class BottomNode(torch.autograd.Function):
    """A node of plain autograd, for regions called below functorch levels."""

    @staticmethod
    def forward(
        ctx: Any, prim: Prim, outs: Tensors, residuals: Residuals | None, *operands: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        _keep(ctx, prim, operands, outs, residuals)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return tuple(_backward(ctx, cotangents, None))


class LevelNode(SingleLevelFunction):
    """A node at one functorch grad level."""

    @staticmethod
    def forward(ctx: Any, prim: Prim, level: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        number = level.level()
        ctx.level = number
        mask = [i for i, t in enumerate(operands) if tracked(t, number)]
        run, residuals = _recorded(prim, mask)
        outs = _lowered(level, run, operands)
        _keep(ctx, prim, operands, outs, residuals)
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return tuple(_backward(ctx, cotangents, ctx.level))


class LevelPull(SingleLevelFunction):
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


# -- below every level ------------------------------------------------------------------------------------


def _forward(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run a region's function; recorded, where a node above it will pull back."""
    if prim.residual_slots:
        compares = prim.dual and prim.family.region.compares_results(False)
        prim.family.results = Results(prim.family) if compares else None
        return _forward_recorded(prim, operands)
    with WriteNotes([unwrapped(t) for t in operands]) as watch:
        if active.attempt is not None:
            active.attempt.append(watch)
        outs, conversion = noting(prim.body, *operands)
    region = prim.family.region
    refuse_strays(f"region {region.name!r}", region.function, conversion, watch.outside)
    return outs


def _forward_recorded(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    region, family = prim.family.region, prim.family
    graded = {i for mask in prim.masks for i in mask}
    key = _signature(prim, operands)
    known: Any = None if key is None else region.traces.get(key)
    if known is None or (known.tape.writes_arguments and not known.tape.shares_alike(operands)):
        tape, known = Tape(region.name), None
        tape.loose = prim.dual
        recorder = Recorder(tape, region.selector, operands, digest=region.digest, decisions=region.decisions)
    else:
        recorder = TraceFollower(
            known.tape, known.kept, region.selector, operands, False, region.decisions, lambda: None
        )
    recorder.reruns, recorder.graded = True, graded
    if active.attempt is not None:
        active.attempt.append(recorder)
    operands = apart(recorder, operands, graded)
    random = RandomState(operands) if region.preserve_rng_state else None
    selector, read, start = recorder.selector, set[int](), next_node()

    def note(outs: Tensors) -> None:
        learns = recorder.kept and not recorder.followed
        nodes = nodes_behind(list(map(node_of, outs)), start) if learns else ()
        saved = {storage(unwrapped(tensor)) for node in nodes for _, tensor in saved_by(node)}
        values = recorder.living_values() if saved else ()
        read.update([number for t, number in values if number >= 0 and storage(t) in saved])

    family.made = note
    with selector.watching(levels=True) if selector else contextlib.nullcontext(), recorder:
        outs, conversion = noting(prim.recorded or prim.body, *operands)
        strays = recorder.outside[len(operands) :]
        refuse_strays(f"region {region.name!r}", region.function, conversion, strays)
    family.made = None
    if region.ranks is not None and ranks_met():
        family.meet = region.ranks.compare_pulled(region, recorder)
    if not recorder.followed:
        recorder.start_recording()
    tape, bottoms = recorder.tape, [unwrapped(t) if is_wrapped(t) else t for t in outs]
    recorded = Recorded(region, recorder, bottoms, random, read, known if recorder.followed else None)
    if key is not None and not recorder.followed:
        if (lesson := recorded.lesson()) is None:
            region.traces.pop(key, None)
        else:
            region.traces[key] = lesson
    family.results = compared(family, recorded, bottoms) if tape.loose else None
    for slot in prim.residual_slots:
        slot.recorded = recorded
    if recorder.selector:
        recorder.selector.finished(tape)
    if active.listeners:
        _report(recorded, operands)
    if recorded.kept:
        recorder.offer_around(recorded.kept)
        recorded.kept.update(held_values(recorded.kept, region.name, [(t, t) for t in bottoms]))
    return outs


def _signature(prim: Prim, operands: Tensors) -> Any:
    """What decides, besides the function, which ops run; None where calls tell nothing of each other."""
    region = prim.family.region
    heard = active.listeners or active.sessions or (region.ranks is not None and ranks_met())
    if region.key is None or region.digest is not None or prim.dual or heard:
        return None
    # (One tensor that is two operands has no number of its own.)
    if len(set(map(id, operands))) < len(operands) or (active.stack and (on_scratch() or selective_around())):
        return None
    given = tuple([(t.shape, t.dtype, lies(t)) for t in operands])
    training = getattr(region.function, "training", None)
    return given, prim.masks, prim.mapped, training, prim.family.ambient.autocast, prim.family.steering


def _report(recorded: Recorded, operands: Tensors) -> None:
    name = recorded.region.name
    for i, tensor in enumerate(operands):
        report(Kept("argument", tensor, name, i))
    for at, value in recorded.kept.items():
        node = recorded.tape.nodes[at]
        for tensor, away in held_tensors(value):
            why = "decision" if at in recorded.tape.decided else "policy"
            report(Kept(why, tensor, name, at, node.op, node.name, away))
    for tensor in untracked(held_states, recorded.draws.values()):
        report(Kept("random", tensor, name, -1))


def _pull(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run a region again as it ran in its forward, and pull its cotangents back."""
    family, recorded = prim.family, None if prim.source is None else prim.source.recorded
    family.present, replay = prim.present, None
    if family.meet is not None:
        family.meet()
    with contextlib.ExitStack() as stack:
        if family.ambient.must_be_restored():
            stack.enter_context(family.ambient.restored(called=True))
        if recorded is not None:
            recorded.check_unwritten()
            needs = recorded.part()
            stack.enter_context(recorded.surroundings(needs))
            replay = recorded.replay(needs, operands)
        stack.enter_context(replaying(replay, family.region.name))
        try:
            return tuple(prim.body(*operands))
        except Missed as missed:
            if missed.around():
                raise
            raise read_again(f"region {family.region.name!r}", missed) from None
