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
    functions_as_they_are,
    graph_kept,
    is_dead,
    is_wrapped,
    level_of,
    next_node,
    ordinary,
    outside_inference,
    uncompiled,
    uncompiled_calls,
    unwrap_for_grad,
    unwrap_once,
    unwrapped,
    wrap_for_grad,
)
from remat.transforms.context import active, inside, ranks_met, untracked
from remat.transforms.errors import RematError, not_repeated
from remat.transforms.functorch.primitive import (
    Carried,
    Prim,
    PullBack,
    Residuals,
    Tensors,
    apart,
    as_differentiated,
    call,
    replaying,
    rule,
    with_memory,
)
from remat.transforms.functorch.results import Results, compared
from remat.transforms.functorch.rules import hollow_operand, plain_duals, rewrapped
from remat.transforms.offload import held_tensors
from remat.transforms.ops import storage
from remat.transforms.state import RandomState, held_states, noting, users_aside
from remat.transforms.tape import (
    Kept,
    Reachability,
    Recorded,
    Recorder,
    Tape,
    WriteNotes,
    held_values,
    holds_unseen,
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
    needed = [residuals is None or _is_read(residuals, t) for t in operands]
    # What the region wrote to may be written to again: a snapshot has what it was before.
    source = residuals or prim.source
    written = () if source is None or source.recorded is None else source.recorded.written
    # Hooks of the user's are given what is saved; they may read it, and what is hollow has no memory.
    ctx.apart = {
        i: rewrapped(t, _unversioned) if keep else hollow_operand(t)
        for i, (t, keep) in enumerate(zip(operands, needed, strict=True))
        if i in written or not keep
    }
    ctx.save_for_backward(*[t for i, t in enumerate(operands) if i not in ctx.apart])


def _unversioned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, whose later writes nobody counts; levels wrap what an attribute returns."""
    return unwrapped(data_of(tensor))


def _is_read(residuals: Residuals, tensor: torch.Tensor) -> bool:
    """Whether the pull-back reads an operand, or a lower level differentiates it too: its place in that graph
    must then be kept."""
    tracked_below = False
    while is_wrapped(tensor):
        tensor = unwrap_once(tensor)
        tracked_below = tracked_below or tensor.requires_grad
    bare = tensor.layout is torch.strided  # for another nothing can stand
    return tracked_below or tensor.requires_grad or not bare or residuals.needs(tensor)


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
    tape = Tape(region.name)
    tape.loose = prim.dual
    graded = {i for mask in prim.masks for i in mask}
    recorder = Recorder(
        tape,
        region.selector,
        operands,
        digest=region.digest,
        reruns=True,
        decisions=region.decisions,
        graded=graded,
    )
    if active.attempt is not None:
        active.attempt.append(recorder)
    operands = apart(recorder, operands, graded)
    random = RandomState(operands) if region.preserve_rng_state else None
    saved, packed = set[int](), list[tuple[int, int]]()
    reaches, unseen, start = list[Reachability](), list[bool](), next_node()

    def watch(tensor: torch.Tensor) -> None:
        # Not by torch functions, which would seem to be the region's.
        with functions_as_they_are():
            bottom = unwrapped(tensor) if is_wrapped(tensor) else tensor
            number = recorder.number(bottom)
            if number < 0 or tape.root_of(number) < 0:
                saved.add(storage(bottom))
        owner = next_node() - 1 - start
        packed.extend((source, owner) for source in tape.sources(number, len(tape.nodes)))

    def note(outs: Tensors) -> None:
        unseen.append(holds_unseen(outs, start))
        if len(outs) > 1:
            reaches.append(Reachability(outs, start))

    family.watch, family.made = watch, note
    selector = recorder.selector
    try:
        watching = selector.watching(levels=True) if selector else contextlib.nullcontext()
        with watching, recorder:
            try:
                outs, conversion = noting(prim.recorded or prim.body, *operands)
            except RematError:
                if recorder.graded_written:
                    raise Carried(recorder.graded_written) from None
                raise
            unseen += recorder.hooked, conversion is not None and conversion.hooked
            strays = recorder.outside[len(operands) :]
            refuse_strays(f"region {region.name!r}", region.function, conversion, strays)
        if region.ranks is not None and ranks_met():
            family.meet = region.ranks.compare_pulled(region, recorder)
    finally:
        watched = family.watch is not None and not any(unseen)
        family.watch, family.made = None, None
    bottoms = [unwrapped(t) if is_wrapped(t) else t for t in outs]
    recorded = Recorded(region, recorder, packed if watched else None, saved, bottoms, random)
    family.results = compared(family, recorded, bottoms) if tape.loose else None
    # Of several levels that differentiate, each has its own graph: then all is needed.
    if watched and len(reaches) == 1 and reaches[0].differ:
        recorded.reach = reaches[0]
    for slot in prim.residual_slots:
        slot.recorded = recorded
    if selector:
        selector.finished(tape)
    if active.listeners:
        _report(recorded, prim.residual_slots[-1], operands)
    if recorded.kept:
        recorder.offer_around(recorded.kept)
        recorded.kept.update(held_values(recorded.kept, region.name, [(t, t) for t in bottoms]))
    return outs


def _report(recorded: Recorded, slot: Residuals, operands: Tensors) -> None:
    name = recorded.region.name
    for i, tensor in enumerate(operands):
        if slot.needs(unwrapped(tensor)):
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
        stack.enter_context(with_memory(operands))
        if family.ambient.must_be_restored():
            stack.enter_context(family.ambient.restored(called=True))
        if recorded is not None:
            recorded.check_unwritten()
            needs = recorded.part(prim.present)
            stack.enter_context(recorded.surroundings(needs))
            replay = recorded.replay(needs, operands)
        stack.enter_context(replaying(replay, family.region.name))
        try:
            return tuple(prim.body(*operands))
        except Missed as missed:
            if missed.around():
                raise
            raise read_again(f"region {family.region.name!r}", missed) from None
        except Carried:
            what = "it wrote a derivative into an argument or a captured tensor"
            raise RematError(not_repeated(family.region.name, what)) from None
