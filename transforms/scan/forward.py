"""The forward of a scan: all steps once, the scheduled states kept."""

from __future__ import annotations

import contextlib

import torch

from remat.transforms.offload import lane
from remat.transforms.scan.body import version, wrote
from remat.transforms.scan.compiled import MOST, UnrolledStep, dense
from remat.transforms.scan.spec import (
    Leaves,
    Scan,
    State,
    Tensors,
    compact,
    now,
    uncached_casts,
    with_step_note,
)
from remat.transforms.state import Ambient, RandomState, device_kinds


def run_forward(scan: Scan, flat: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
    """Run all steps at the bottom of the functorch stack, leaving the scheduled states in `scan.record`."""
    record = scan.record
    record.states.clear()
    record.tapes.clear()
    record.ambient, record.start = Ambient(device_kinds(flat)), RandomState(flat)
    xs = flat[len(flat) - scan.sizes[2] :]
    before = [version(x) for x in xs]
    with uncached_casts() if record.ambient.casts else contextlib.nullcontext():
        carry, stacks = (_blocks if scan.in_blocks else _steps)(scan, flat)
        random = now(record.start) is not record.start
        if random and not record.random:
            # The first step drew nothing, so no generator states were noted, but a later one did; or compiled
            # steps did, which do not draw the same numbers again: once more.
            record.random = True
            record.states.clear()
            record.tapes.clear()
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
    consts, carry, xs = scan.split(flat)
    record, proceed, on_step = scan.record, scan.proceed, scan.spec.on_step
    n, states, moment = scan.spec.length, record.states, record.start
    place = scan.spec.schedule.place(n if proceed is None else None)
    stacks: list[torch.Tensor] = []
    rows: list[list[torch.Tensor]] = []
    assert moment is not None
    k = 0
    while (n is None or k < n) and (proceed is None or proceed(consts, carry)):
        if (slot := place(k)) is not None:
            if record.random:
                moment = now(moment)
            states[slot] = State(k, scan.sent(compact(carry), slot) if k else carry, moment)
        at = scan.at(k)
        carry, ys = with_step_note(scan, k, consts, carry, [x.select(0, at) for x in xs])
        if not scan.plain:
            rows.append(ys)
        elif k == 0:
            stacks = [y.new_empty((scan.length, *y.shape)) for y in ys]
        for stack, y in zip(stacks, ys, strict=scan.plain):
            stack.select(0, at).copy_(y)
        if k == 0:
            record.random = record.random or now(moment) is not moment
        if on_step is not None:
            on_step("forward", k)
        k += 1
    record.length = k
    if not scan.plain:
        # An enclosing region records ops and must not meet writes into parts of a tensor.
        stacks = [torch.stack(column) for column in zip(*rows[:: -1 if scan.reverse else 1], strict=True)]
    return carry, stacks


def _blocks(scan: Scan, flat: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
    """Compiled blocks of steps, the schedule's states lying between them; what is left over runs as it is."""
    consts, carry, xs = scan.split(flat)
    n, size, record = scan.length, scan.blocks.size, scan.record
    blocks, dense_xs, carry = scan.blocks.at(consts), dense(xs), dense(carry)
    place = scan.spec.schedule.place(n)
    most = size if scan.spec.on_step is not None else MOST * size
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
        stacks = stacks or [y[0].new_empty((n, *y[0].shape[1:])) for y in ys]
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
