"""A scan as one differentiable function of flat tensors, its pull-back run by a checkpointing schedule.

The forward keeps the carries that the schedule names. The pull-back executes the schedule's actions: it
advances without tape, and reverses a step (or a segment) by evaluating it with its tape and pulling back at
once. Both are `autograd.Function`s with vjp, vmap and jvp rules, so that torch.func composes with them; a
rule never opens the recomputation to the level it serves. Higher orders differentiate the pull-back in its
mathematical form, two scans: one that lists the states, one that runs over them in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch.autograd import forward_ad

from remat.transforms.compat import (
    dual_level_known_if_any,
    forward_ad_active,
    forward_grad_enabled,
    function_modes,
    graph_kept,
    in_transform,
    is_wrapped,
    modes_active,
    ordinary,
    outside_inference,
    top_hooks,
    uncompiled,
)
from remat.transforms.context import active, untracked
from remat.transforms.offload import lane
from remat.transforms.ops import with_memory
from remat.transforms.pytree import merge, smooth
from remat.transforms.scan.backward import Captured, dropped, pull_back, saved_by
from remat.transforms.scan.body import Body, version, wrote
from remat.transforms.scan.compiled import MOST, UnrolledStep, dense
from remat.transforms.scan.rules import (
    batch,
    expand,
    kept_batched,
    kept_for_batch,
    pull_back_of,
    tangents_of,
    unbatched,
)
from remat.transforms.scan.spec import (
    Leaves,
    Record,
    Scan,
    State,
    Tensors,
    accumulating_nothing,
    as_in_forward,
    compact,
    drawing_apart,
    index_states,
    lift_states,
    now,
    own,
    report_kept,
    uncached_casts,
    with_step_note,
)
from remat.transforms.state import Ambient, RandomState, device_kinds, fingerprints_of, users_aside


def run(scan: Scan, flat: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
    """The final carry and the stacked ys, differentiable with respect to `flat`."""
    if function_modes():
        # A mode that swaps captured tensors sees torch functions, not Functions: let it see these operands.
        # By an op that traces pass over: of a region's levels each differentiates other operands.
        # (An alias made without grad mode says that it is a leaf, and leads to none.)
        with torch.enable_grad():
            flat = [torch.ops.aten.alias(t) if smooth(t) and _torch_differentiable(t) else t for t in flat]
    flat = drawing_apart(scan, flat)
    for mode in active.stack:
        mode.tape.scanned = True
    # Whoever watches (an enclosing region, offloading hooks) must see the states as saved tensors.
    levels, opaque = in_transform(), scan.opaque
    plain = opaque is None and not (levels or top_hooks() or modes_active())
    record = Record(None if opaque is None else opaque.ambient)
    scan = replace(scan, plain=plain, levels=levels, record=record)
    scan.record.compared = torch.is_grad_enabled() and any(map(_torch_differentiable, flat))
    out = _Scan.apply(scan, *_but_unread(scan, flat))
    if active.listeners and scan.record.compared:
        report_kept(scan, flat, out)
    carry = list(scan.record.final)
    for i, tensor in zip(scan.tensors, out, strict=False):
        carry[i] = tensor
    count = len(scan.tensors)
    return carry, list(out[count : len(out) - scan.extra])


def _but_unread(scan: Scan, flat: Tensors) -> Tensors:
    """The operands, those apart from their graphs that no step reads.

    They were found, and may be of another step (`self.last`): a backward would be led into its graph, which
    may be freed. So the forward runs before its node is made.
    """
    body = scan.step
    if not isinstance(body, Body) or body.at_once or scan.levels or not torch.is_grad_enabled():
        return flat
    if not outside_inference() or any([t.is_inference() for t in flat]):
        return flat
    body.unread = {i for i, t in enumerate(body.captured) if t.requires_grad and not t.is_leaf}
    if not body.unread:
        return flat
    with torch.no_grad(), forward_grad_enabled(False):
        scan.record.made = _Scan.forward(scan, *flat)
    unread, body.unread = body.unread, set()
    return [untracked(t.detach) if i in unread else t for i, t in enumerate(flat)]


def _torch_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or is_wrapped(tensor)


class _Recorded(torch.autograd.Function):
    """A Function that autograd records where it records ops."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        made_there = any([isinstance(arg, torch.Tensor) and arg.is_inference() for arg in args])
        if in_transform() or (outside_inference() and not made_there):
            return super().apply(*args)
        if outside_inference():
            return super().apply(*untracked(ordinary, args))
        # Below a level of torch.func that is in inference mode no op is recorded; a Function would be, and
        # cannot save what was made there. Its ops are those that run outside, as in a pull-back, so Functions
        # inside, for which torch turns grad mode on, are given what requires no gradient.
        with torch.inference_mode(False), torch.no_grad():
            return super().apply(*untracked(ordinary, args, True))


class _Scan(_Recorded):
    """scan, *operands -> tensors of the carry, ys, and under functorch the kept states."""

    @staticmethod
    def forward(scan: Scan, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if (made := scan.record.made) is not None:
            scan.record.made = None
            return made
        if scan.opaque is not None:
            scan.record.final = [None] * len(scan.carry)
            return tuple(scan.opaque.forward(scan, flat))
        with torch.no_grad():
            carry, ys = run_forward(scan, flat)
        scan.record.final = [None if i in scan.tensors else v for i, v in enumerate(carry)]
        index_states(scan, flat)
        taken = {id(t) for t in (*flat, *scan.record.kept)}
        outs = []
        for out in (*(carry[i] for i in scan.tensors), *ys):
            # An output that is an operand or a state would be one tensor with two histories.
            outs.append(own(out, taken))
            taken.add(id(outs[-1]))
        if scan.plain:
            return tuple(outs)
        kept, scan.record.kept = scan.record.kept, []
        return (*map(with_memory, outs), *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        scan, *flat = inputs
        ctx.scan = scan
        kept = output[len(output) - scan.extra :]
        ctx.mark_non_differentiable(*kept, *(t for t in output if not smooth(t)))
        ctx.captured = Captured(flat[: scan.sizes[0]])
        ctx.save_for_backward(*flat, *kept)
        ctx.save_for_forward(*flat)
        ctx.set_materialize_grads(False)
        ctx.outputs, ctx.shapes = len(output) - len(kept), [t.shape for t in flat]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *cts: torch.Tensor | None) -> tuple[Any, ...]:
        scan: Scan = ctx.scan
        saved = saved_by(ctx, scan)  # once: every look unpacks anew, and may recompute
        if not graph_kept():
            ctx.scan = ctx.captured = None  # with what the body holds
        needs = tuple(ctx.needs_input_grad[1:])
        with users_aside():
            grads = _Scan._pulled(scan, needs, saved, cts[: ctx.outputs])
        for grad, shape in zip(grads[1:], ctx.shapes, strict=True):
            if grad is not None and grad.shape != shape:
                raise dropped(scan.spec.name)
        return grads

    @staticmethod
    def _pulled(scan: Scan, needs: Any, saved: Tensors, cts: Sequence[torch.Tensor | None]) -> Any:
        total = sum(scan.sizes)
        flat, kept = saved[:total], list(saved[total:])
        if scan.plain:
            kept = scan.record.kept
        if not (scan.levels or in_transform() or torch.is_grad_enabled() or _dual(saved, cts)):
            if scan.opaque is not None:
                return (None, *scan.opaque.pull(scan, flat, kept, needs, cts))
            states = lift_states(scan, flat, kept)
            if graph_kept():
                scan = replace(scan, record=replace(scan.record, tapes=dict(scan.record.tapes)))
            else:
                # The slots' tensors must be the machine's alone, so that a freed slot is freed memory.
                scan.record.kept, kept = [], []
            return (None, *pull_back(scan, flat, states, needs, cts))
        present = tuple(ct is not None for ct in cts)
        with dual_level_known_if_any() if scan.opaque is not None else nullcontext():
            given = [ct for ct in cts if ct is not None]
            out = _PullBack.apply(scan, needs, present, *flat, *kept, *given)
        rest = iter(out)
        return (None, *(next(rest) if need else None for need in needs))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], scan: Scan, *flat: torch.Tensor) -> tuple[Any, Any]:
        values = unbatched(scan, info, in_dims[1:])
        batched, operands = batch(scan, info, in_dims[1:], flat, [False] * len(flat), values)
        out = _Scan.apply(batched, *operands)
        carry, kept = len(scan.tensors), batched.extra
        if scan.opaque is not None:
            scan.opaque.entry(scan).tape = kept
        first = len(out) - kept
        states, dims = kept_batched(scan, out[first:], info.batch_size, values)
        plain, ys = (values.carry, values.ys) if values else (0, 0)
        ahead = [*[None] * plain, *[0] * (carry - plain), *[None] * ys, *[1] * (first - carry - ys)]
        return (*out[:first], *states), (*ahead, *dims)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        scan: Scan = ctx.scan
        flat = [_primal(t) for t in ctx.saved_tensors[: sum(scan.sizes)]]
        with forward_grad_enabled(True):  # off in here, and levels below want theirs
            outs = tangents_of(run, scan, flat, tangents[1:])
        return (*outs, *([None] * scan.extra))


class _PullBack(_Recorded):
    """scan, needs, present, *operands, *kept, *cotangents -> gradients of the needed operands."""

    @staticmethod
    def forward(scan: Scan, needs: Any, present: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat, kept, cts = scan.parts(present, tensors)
        if scan.opaque is not None:
            found = scan.opaque.pull(scan, flat, kept, needs, cts)
            return tuple(g for g in found if g is not None)
        states = lift_states(scan, flat, kept)
        # Other derivatives may need the tapes again.
        scan = replace(scan, record=replace(scan.record, tapes=dict(scan.record.tapes)))
        grads = pull_back(scan, flat, states, needs, cts)
        # Cotangents passed through unchanged would be outputs that are operands.
        given = {id(t) for t in tensors}
        found = [g for g, need in zip(scan.with_zeros(grads, flat), needs, strict=True) if need]
        return tuple(with_memory(own(g, given)) for g in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scan, ctx.needs, ctx.present, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *cts: torch.Tensor | None) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[3:]
        tensors = ctx.saved_tensors
        at = [i for i, want in enumerate(wanted) if want and i not in _kept_range(ctx, tensors)]
        with users_aside(), as_in_forward(ctx.scan, seeded=True), accumulating_nothing(ctx.scan):
            made: Any = torch.func.vjp(_pull_back_at(ctx, tensors, at), *(tensors[i] for i in at))
            full = [torch.zeros_like(t) if ct is None else ct for t, ct in zip(made[0], cts, strict=True)]
            grads = dict(zip(at, made[1](tuple(full)), strict=True))
        ctx.scan = ctx.scan if graph_kept() else None
        return (None, None, None, *(grads.get(i) for i in range(len(tensors))))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], scan: Scan, needs: Any, present: Any, *tensors: torch.Tensor
    ) -> tuple[Any, Any]:
        dims = in_dims[3:]
        flat, kept, cts = scan.parts(present, tensors)
        total, last = len(flat), len(tensors) - sum(present)
        place = len(scan.over)  # of the new dimension in cotangents and gradients
        if scan.opaque is None and all(dim is None for dim in dims[:last]):
            over = ((info.batch_size, info.randomness), *scan.over)
            batched, place = replace(scan, over=over, blocks=None), 0
        else:
            batched, flat = batch(scan, info, dims[:total], flat, list(needs))
            kept = kept_for_batch(scan, kept, dims[total:last], info.batch_size)
        ct_dims = iter(dims[last:])
        moved = []
        for i, ct in enumerate(cts):
            if ct is not None:
                to = place + (i >= len(scan.tensors))
                moved.append(expand(ct, next(ct_dims), info.batch_size, to))
        out = _PullBack.apply(batched, needs, present, *flat, *kept, *moved)
        a, b, c = scan.sizes
        where = [place] * (a + b) + [place + 1] * c
        return out, tuple(d for d, need in zip(where, needs, strict=True) if need)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        tensors, given = [_primal(t) for t in ctx.saved_tensors], tangents[3:]
        skip = _kept_range(ctx, tensors)
        at = [i for i, t in enumerate(given) if t is not None and i not in skip]
        # Off in here, and levels below want the tangents of what is copied, too.
        with (
            forward_grad_enabled(True),
            as_in_forward(ctx.scan, seeded=True),
            dual_level_known_if_any(),
            accumulating_nothing(ctx.scan),
        ):
            primals, duals = tuple(with_memory(tensors[i]) for i in at), tuple(given[i] for i in at)
            return torch.func.jvp(_pull_back_at(ctx, tensors, at), primals, duals)[1]


def _pull_back_at(ctx: Any, tensors: Tensors, at: list[int]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The pull-back as a function of its tensors at these positions, the others as they are."""

    def differentiable(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat, _, cts = ctx.scan.parts(ctx.present, merge(tensors, at, values))
        return pull_back_of(run, ctx.scan, ctx.needs, flat, cts)

    return differentiable


def _dual(saved: Tensors, cts: Sequence[torch.Tensor | None]) -> bool:
    return forward_ad_active([t for t in (*saved, *cts) if t is not None])


def _primal(tensor: torch.Tensor) -> torch.Tensor:
    # What a jvp rule finds saved still has its tangent, and the levels that run inside would see it.
    return forward_ad.unpack_dual(tensor).primal


def _kept_range(ctx: Any, tensors: Tensors) -> range:
    """Positions of kept states among the pull-back's tensors, which nobody differentiates."""
    return range(sum(ctx.scan.sizes), len(tensors) - sum(ctx.present))


# -- the forward: all steps once, the scheduled states kept ------------------------------------------------


def run_forward(scan: Scan, flat: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
    """Run all steps at the bottom of the functorch stack, leaving the scheduled states in `scan.record`."""
    record = scan.record
    record.begin()
    record.ambient, record.start = Ambient(device_kinds(flat)), RandomState(flat)
    xs = flat[len(flat) - scan.sizes[2] :]
    before = [version(x) for x in xs]
    with uncached_casts() if record.ambient.casts else nullcontext():
        carry, stacks = (_blocks if scan.in_blocks else _steps)(scan, flat)
        random = now(record.start) is not record.start
        if random and not record.random:
            # The first step drew nothing, so no generator states were noted, but a later one did; or compiled
            # steps did, which do not draw the same numbers again: once more.
            record.random = True
            record.begin()
            record.start.restore()
            carry, stacks = _steps(scan, flat)
    if scan.offloaded is not None:
        # What was sent may be a result too, and others may write to it.
        for tensor in (t for t in carry if isinstance(t, torch.Tensor)):
            lane(tensor).finish()
    if before != [version(x) for x in xs]:
        raise wrote(scan.spec.name, "xs")
    return carry, stacks


def _steps(scan: Scan, flat: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
    """One step after another. Of a loop, where a state goes is decided before it is known whether another
    step follows its own."""
    if getattr(scan.step, "at_once", None) is not None and not function_modes():
        return _at_once(scan, flat)
    consts, carry, xs = scan.split(flat)
    record, proceed, on_step = scan.record, scan.proceed, scan.spec.on_step
    n, states, moment = scan.spec.length, record.states, record.start
    place = scan.spec.schedule.place(n if proceed is None else None)
    stacks: list[torch.Tensor] = []
    rows: list[list[torch.Tensor]] = []
    assert moment is not None
    apart = max(1, (n or 64) // 4)  # a comparison costs as much as a few small ops
    k, ys = 0, []
    while (n is None or k < n) and (proceed is None or proceed(consts, carry)):
        if (slot := place(k)) is not None:
            if record.random:
                moment = now(moment)
            states[slot] = State(k, scan.sent(compact(carry), slot) if k else carry, moment)
            if record.compared and k >= max(record.seen, default=0) + apart:
                record.seen[k] = fingerprints_of(carry)
        at = scan.at(k)
        carry, ys = with_step_note(scan, k, consts, carry, [x.select(0, at) for x in xs])
        if not scan.plain:
            rows.append(ys)
        elif k == 0:
            stacks = [scan.spec.stack(y) for y in ys]
        for stack, y in zip(stacks, ys, strict=scan.plain):
            stack.select(0, at).copy_(y)
        if k == 0:
            record.random = record.random or now(moment) is not moment
        if on_step is not None:
            on_step("forward", k)
        k += 1
    record.length = k
    if k and record.compared:
        record.seen[k] = fingerprints_of([*carry, *ys])
    if not scan.plain:
        # An enclosing region records ops and must not meet writes into parts of a tensor.
        stacks = [torch.stack(column) for column in zip(*rows[:: -1 if scan.reverse else 1], strict=True)]
    return carry, stacks


def _at_once(scan: Scan, flat: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
    """All steps by one call, in less than one after another takes; and the first one, which is checked."""
    consts, carry, xs = scan.split(flat)
    record, n, step = scan.record, scan.length, cast(Body, scan.step)
    with_step_note(scan, 0, consts, carry, [x.select(0, scan.at(0)) for x in xs])
    with step.swapped(consts, [*carry, *xs]):
        carries, stacks = step.at_once(carry, xs)
    for k in range(n):  # each is kept: who says how steps are computed at once asks for "all"
        state = compact([c.select(0, k) for c in carries]) if k else carry
        record.states[k] = State(k, scan.sent(state, k), record.start)
    record.length = n
    return [c.select(0, n) for c in carries], stacks


def _blocks(scan: Scan, flat: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
    """Compiled blocks of steps, the schedule's states lying between them; what is left over runs as it is."""
    consts, carry, xs = scan.split(flat)
    n, size, record = scan.length, scan.blocks.size, scan.record
    blocks, dense_xs, carry = scan.blocks.at(consts), dense(xs), dense(carry)
    place = scan.spec.schedule.place(n)
    # Of large ones what several give would lie beside where it is put.
    most = size if scan.spec.on_step is not None or size == 1 else MOST * size
    stacks: list[torch.Tensor] = []

    def slot_at(k: int) -> int | None:
        slot = place(k) if k < n else None
        return None if k and scan.taped else slot  # the carries are rows of the tapes

    k, slot = 0, slot_at(0)
    while k < n:
        if slot is not None:
            record.states[slot] = State(k, scan.sent(compact(carry), slot) if k else carry, record.start)
        start, k = k, k + size
        if k <= n:
            slot = slot_at(k)
            while slot is None and k + size <= n and k - start < most:
                k += size
                slot = slot_at(k)
            part = scan.block(dense_xs, start, k - start)
            carry, ys = _run_blocks(scan, blocks, carry, part, start, k)
        else:
            k = start + 1
            slot = slot_at(k)
            rows = scan.block(dense_xs, start, 1)
            carry, outs = with_step_note(scan, start, consts, carry, [row[0] for row in rows])
            ys = [(y.unsqueeze(0),) for y in outs]
        stacks = stacks or [scan.spec.stack(y[0].select(0, 0)) for y in ys]
        for stack, parts in zip(scan.block(stacks, start, k - start), ys, strict=True):
            torch.cat(parts[::-1] if scan.reverse else parts, out=stack)
        scan.tell("forward", range(start, k))
    return carry, stacks


def _run_blocks(
    scan: Scan, blocks: UnrolledStep, carry: Leaves, xs: Tensors, start: int, stop: int
) -> tuple[Leaves, list[tuple[torch.Tensor, ...]]]:
    """The carry after the blocks of these steps, and of each y what every block gives; `xs`: their rows."""
    size, tapes, ys = blocks.size, scan.record.tapes, []
    for k, rows in zip(range(start, stop, size), blocks.rows(xs, (stop - start) // size), strict=True):
        carry, outs, tape = blocks.run(carry, rows, scan.taped)
        ys.append(outs)
        if scan.taped:
            tapes[k] = scan.stowed(tape, blocks.host(len(carry)))
    return carry, list(zip(*ys, strict=True))
