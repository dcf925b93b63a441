"""The pull-back of a scan: a schedule's actions, executed on tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from remat.transforms.closure import Missed, read_again
from remat.transforms.compat import (
    batched_grads_around,
    in_transform,
    is_batched_anyhow,
    is_legacy_batched,
    is_wrapped,
    outside_batched_grads,
)
from remat.transforms.errors import RematError
from remat.transforms.ops import storage
from remat.transforms.scan.compiled import MOST, UnrolledStep, dense
from remat.transforms.scan.instructions import with_notice
from remat.transforms.scan.spec import (
    Coming,
    Leaves,
    Scan,
    State,
    Tensors,
    as_in_forward,
    compact,
    fetch,
    with_step_note,
)
from remat.transforms.scan.vjp import Pull, by_func
from remat.transforms.sharded import PLAIN
from remat.transforms.state import Fingerprint, alike, fingerprints_of
from remat.transforms.tape import holders, holds, noticing


class _Backward:
    """The machine that executes a schedule's actions on tensors."""

    def __init__(
        self,
        scan: Scan,
        flat: Tensors,
        states: dict[int, State],
        needs: Sequence[bool],
        cts: Sequence[torch.Tensor | None],
    ) -> None:
        self.scan, self.slots = scan, states
        self.consts, self.devices, self.xs = scan.split(flat)
        a, b, _ = scan.sizes
        self.needs = list(needs[:a]), list(needs[a + b :])  # of consts and of xs
        self.hand = State(0, [], None)  # nothing, until the first state is restored
        self.blocks: UnrolledStep | None = scan.blocks.at(self.consts) if scan.in_blocks else None
        self.tapes = scan.record.tapes
        self.run: Any = outside_batched_grads()(with_step_note) if batched_grads_around() else with_step_note
        self.coming: dict[int, Coming] = {}
        self.again: dict[int, list[Fingerprint]] = {}
        self.pull = Pull(self.consts, self.needs, scan.over, by_func(flat))
        if self.blocks is not None:
            self.xs = dense(self.xs)
            self.device = flat[scan.sizes[0]].device
        self.const_grads: list[torch.Tensor | None] = [None] * a
        self.owned = [False] * a
        self.x_grads: list[torch.Tensor | None] = [None] * len(self.xs)
        self.x_rows: dict[int, dict[int, torch.Tensor]] = {}
        count = len(scan.tensors)
        self.carry_cts, self.y_cts = list(cts[:count]), list(cts[count:])
        # Only then can a gradient have a batch dimension that plain memory refuses.
        given = [t for t in (*flat, *cts) if t is not None]
        self.batched = in_transform() or any([is_wrapped(t) or is_legacy_batched(t) for t in given])

    def _x(self, step: int) -> list[torch.Tensor]:
        at = self.scan.at(step)
        return [x.select(0, at) for x in self.xs]

    def _seed(self) -> None:
        if self.scan.record.random and self.hand.random is not None:
            self.hand.random.restore()

    def advance(self, start: int, stop: int) -> None:
        self._seed()
        carry = self.hand.carry
        blocks = self.blocks
        size = blocks.size if blocks is not None else 0
        with torch.no_grad():
            while blocks is not None and start + size <= stop:
                end = min(start + MOST * size, stop - (stop - start) % size)
                for rows in self._rows(self.xs, start, end):
                    carry, _, _ = blocks.run(carry, rows, False)
                self.scan.tell("advance", range(start, end))
                start = end
            for k in range(start, stop):
                carry, _ = self._step(k, self.consts, carry, self._x(k))
                self.scan.tell("advance", range(k, k + 1))
        drew = self.scan.record.random and self.hand.random is not None
        self.hand = State(stop, carry, self.hand.random.again() if drew else None)  # type: ignore[union-attr]

    def store(self, step: int, slot: int) -> None:
        moved = self.scan.sent(compact(self.hand.carry), slot)
        self.slots[slot] = State(step, moved, self.hand.random)

    def restore(self, step: int, slot: int) -> None:
        carry = self.coming.pop(slot, None) or self._fetch(slot)
        self.hand = State(step, carry(), self.slots[slot].random)

    def expect(self, slot: int) -> None:
        """The next state to be restored lies in this slot: have it come while the steps before are run."""
        self.coming[slot] = self._fetch(slot)

    def _fetch(self, slot: int) -> Coming:
        return self.scan.fetched(self.slots[slot].carry, slot, self.devices)

    def free(self, slot: int) -> None:
        del self.slots[slot]

    def reverse(self, start: int, stop: int) -> None:
        if self.blocks is None or stop - start < self.blocks.size:
            self._reverse_steps(start, stop)
        else:
            self._reverse_blocks(self.blocks, start, stop)

    def all_taped(self) -> bool:
        """Pull back through everything, if the forward has left the tape of every block."""
        if self.blocks is None or len(self.tapes) < self.scan.length // self.blocks.size:
            return False
        self.hand = State(0, self.devices, None)
        self.reverse(0, self.scan.length)
        return True

    def _reverse_steps(self, start: int, stop: int) -> None:
        self._seed()
        scan, carry, rows, cts = self.scan, self.hand.carry, [], []
        for k in range(start, stop):
            at = scan.at(k)
            rows.append([x.select(0, at) for x in self.xs])
            cts.append([None if ct is None else ct.select(0, at) for ct in self.y_cts])
        self.hand = State(start, [], None)  # the tape holds what it needs of the carry

        def steps(consts: Tensors, carry: Leaves, rows: list[list[torch.Tensor]]) -> tuple[Leaves, list[Any]]:
            ys = []
            for k, x in enumerate(rows, start):
                carry, y = self._step(k, consts, carry, x)
                ys.append(y)
            return carry, ys

        by_const, self.carry_cts, by_row = self.pull(steps, carry, rows, self.carry_cts, cts)
        self._add_consts(by_const)
        if stop == scan.length and not (self.batched or scan.over):
            for i in range(len(self.xs)):
                if all([row[i] is not None for row in by_row]):
                    self._x_grad(i, last=True)
        for k, row in zip(range(start, stop), by_row, strict=True):
            self._put(scan.at(k), row)
        self.scan.tell("reverse", range(stop - 1, start - 1, -1))

    def _step(self, k: int, consts: Tensors, carry: Leaves, x: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
        carry, ys = self.run(self.scan, k, consts, carry, x)
        if k + 1 in self.scan.record.seen:
            self.again[k + 1] = fingerprints_of([*carry, *ys] if k + 1 == self.scan.length else carry)
        return carry, ys

    def _rows(self, xs: Tensors, start: int, stop: int) -> Sequence[Sequence[torch.Tensor]]:
        """The rows of the blocks of these steps."""
        assert self.blocks is not None
        return self.blocks.rows(self.scan.block(xs, start, stop - start), (stop - start) // self.blocks.size)

    def _reverse_blocks(self, blocks: UnrolledStep, start: int, stop: int) -> None:
        """Blocks, and the steps left over. The tapes are there, or are made; a single block needs none."""
        size, first = blocks.size, self.hand.carry
        rest, most = stop - (stop - start) % size, MOST * size
        tapes = [self.tapes.pop(k, None) for k in range(start, rest, size)]
        if tapes[0] is None and stop - start > size:
            carry, tapes = first, []
            for low in range(start, rest, most):
                for rows in self._rows(self.xs, low, min(low + most, rest)):
                    carry, _, tape = blocks.run(carry, rows, True)
                    tapes.append(tape)
        if rest < stop:
            self.hand = State(rest, self._ends(tapes[-1])(), None)
            self._reverse_steps(rest, stop)
        self.hand = State(start, [], None)
        if self.scan.spec.on_step is not None or size == 1:
            most = size  # large ones: what several of them give would lie beside where it is put
        supply = self._supply(first, tapes)
        for low in range(start + (rest - start - 1) // most * most, start - 1, -most):
            self._pull_blocks(blocks, supply, low, min(low + most, rest))

    def _ends(self, tape: Sequence[torch.Tensor] | None) -> Coming:
        """The carry after a block, on its way."""
        assert tape is not None
        return self._on_its_way([t.select(0, -1) for t in tape[: len(self.devices)]])

    def _on_its_way(self, tensors: Sequence[torch.Tensor]) -> Coming:
        away = [t.device != self.device and self.device for t in tensors]
        return fetch(list(tensors), away)

    def _supply(self, first: Leaves, tapes: list[Any]) -> Iterator[tuple[Leaves, Leaves | None]]:
        """The carry before each block and its tape, from the last block; `first`: that before the first one.

        While a block is pulled back through, what the next one takes is on its way.
        """
        coming: Any = None
        while tapes or coming is not None:
            carry, tape = coming or self._next(first, tapes)
            coming = self._next(first, tapes) if tapes else None
            yield carry(), tape and tape()

    def _next(self, first: Leaves, tapes: list[Any]) -> tuple[Coming, Coming | None]:
        tape = tapes.pop()
        carry = self._ends(tapes[-1]) if tapes else lambda: first
        return carry, None if tape is None else self._on_its_way(tape)

    def _pull_blocks(self, blocks: UnrolledStep, supply: Iterator[Any], start: int, stop: int) -> None:
        """Pull back through the blocks of these steps, the last ones that `supply` has."""
        at = [i for i, ct in enumerate(self.y_cts) if ct is not None]
        given = dense([ct for ct in self.y_cts if ct is not None])
        rows, y_rows = list(self._rows(self.xs, start, stop)), list(self._rows(given, start, stop))
        y_cts: list[Any] = [None] * len(self.y_cts)
        found = []
        while rows:
            carry, tape = next(supply)
            for i, ct in zip(at, y_rows.pop(), strict=True):
                y_cts[i] = ct
            cts = self.carry_cts, y_cts
            self.carry_cts, by_x = blocks.pull(carry, rows.pop(), tape, cts, self.needs, self.const_grads)
            found.append(by_x)
        for i in range(len(self.xs)):
            parts = [by_x[i] for by_x in found]
            # They are as large as all rows together: gone before the next tensor of xs has its rows.
            for by_x in found:
                by_x[i] = None
            self._put_blocks(i, parts if self.scan.reverse else parts[::-1], range(start, stop))
        self.scan.tell("reverse", range(stop - 1, start - 1, -1))

    def _put_blocks(self, i: int, parts: list[torch.Tensor | None], steps: range) -> None:
        """Gradients of the rows of an x, block by block as they lie; None where none comes to a block."""
        if all([part is None for part in parts]) and self.x_grads[i] is None:
            return
        room = self._x_grad(i, last=steps.stop == self.scan.length)
        whole = self.scan.block([room], steps.start, len(steps))[0]
        for part, rows in zip(parts, whole.chunk(len(parts)), strict=True):
            rows.zero_() if part is None else rows.copy_(part)

    def _x_grad(self, i: int, last: bool = False) -> torch.Tensor:
        """Room for the gradients of an x; `last`: the rows of the last steps are put, so that all will be."""
        found = self.x_grads[i]
        if found is None:
            found = torch.empty_like(self.xs[i]) if last else self.scan.zeros(self.xs[i], rows=True)
            self.x_grads[i] = found
        return found

    def _add_consts(self, grads: list[torch.Tensor | None]) -> None:
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            total = self.const_grads[i]
            if total is None:
                self.const_grads[i] = grad
            elif self.owned[i] and not (self.batched and is_batched_anyhow(grad)):
                total.add_(grad)
            else:  # the first gradient may be an alias of a cotangent: not ours to write into
                self.const_grads[i], self.owned[i] = total + grad, True

    def _put(self, at: int, row: list[torch.Tensor | None]) -> None:
        for i, grad in enumerate(row):
            if grad is None:
                if (whole := self.x_grads[i]) is not None:
                    whole.select(0, at).zero_()
                continue
            if self.batched and is_batched_anyhow(grad):  # rows are kept apart and stacked at the end
                self.x_rows.setdefault(i, {})[at] = grad
                continue
            self._x_grad(i).select(0, at).copy_(grad)

    def grads(self) -> list[torch.Tensor | None]:
        for i, rows in self.x_rows.items():
            zero = self.scan.zeros(self.xs[i].select(0, 0))
            self.x_grads[i] = torch.stack([rows.get(at, zero) for at in range(self.scan.length)])
        return [*self.const_grads, *self.carry_cts, *self.x_grads]


def pull_back(
    scan: Scan,
    flat: Tensors,
    states: dict[int, State],
    needs: Sequence[bool],
    cts: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Gradients of `flat` (None: zero or not needed) from the cotangents of the carry's tensors and of ys."""
    with torch.no_grad():
        machine = _Backward(scan, flat, states, needs, cts)
    stored = {state.step: slot for slot, state in states.items()}
    try:
        with torch.no_grad(), as_in_forward(scan):
            if not machine.all_taped():
                actions = scan.spec.schedule.actions(scan.length, stored)
                if scan.offloaded is not None:
                    actions = with_notice(actions, machine.expect)
                for action in actions:
                    getattr(machine, action.verb)(*action)
    except Missed as missed:
        if missed.around():
            raise
        raise read_again(scan.spec.name, missed) from None
    except RuntimeError as error:
        if "invalid gradient" in str(error) and "compatible with [0]" in str(error):
            raise dropped(scan.spec.name) from error
        raise
    check_seen(scan, machine.again)
    grads = machine.grads()
    return [g if need else None for g, need in zip(grads, needs, strict=True)]


# -- what a forward and a backward must have alike --------------------------------------------------------


def check_seen(scan: Scan, again: dict[int, list[Fingerprint]]) -> None:
    """Raise if steps that were evaluated again had other results than in the forward.

    So is noticed that what a step reads beside its operands has changed.
    """
    casts = scan.record.ambient is not None and scan.record.ambient.casts
    for done, found in sorted(again.items()):
        before = scan.record.seen[done][: len(found)]
        if [m[:2] for m in before] != [m[:2] for m in found]:
            continue  # another derivative evaluates other shapes
        if not alike(before, found, casts):
            raise RematError(
                f"{scan.spec.name}: step {done - 1} or one before it gave other numbers when the "
                "backward evaluated it again. What a step reads beside its carry and its row of xs "
                "(Python numbers, attributes, tensors without gradients) must be the same in both "
                "passes. Put it into the carry or into xs, or change it after the backward."
            )


def dropped(name: str) -> RematError:
    """What to raise where weights had another shape when the scan was called than when its steps ran."""
    return RematError(
        f"{name}: a tensor that its steps read and that is differentiated has another shape there than when "
        "the scan was called, such as a weight whose memory hooks drop and fetch by `.data` (ZeRO-3). Fetch "
        "it around the scan, drop its storage instead (`untyped_storage().resize_(0)`), or write a Python "
        "loop of regions."
    )


class Captured:
    """Watched for fused optimizers, which write to what a backward reads and count no version up.

    (Of other writes autograd knows, which holds it.)
    """

    def __init__(self, consts: Tensors) -> None:
        self._consts = consts
        if noticing:
            holders.add(weakref.ref(self, holders.discard))
        else:
            holds(self)

    def memories(self) -> list[int]:
        """The storages of what the body leads to."""
        return [storage(t) for t in self._consts if type(t) in PLAIN]


def saved_by(ctx: Any, scan: Scan) -> Tensors:
    """What a scan's node has saved.

    Raises:
        RematError: some of it was written to, be it read or not.
    """
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RematError(
            f"{scan.spec.name}: an operand or a tensor that its body leads to was written in place between "
            "its forward and its backward, which evaluates steps again. Write out of place, run the backward "
            "first, or let the body lead to nothing but what it reads (`weight = model.weight` in front of "
            f"it). Torch says: {error}"
        ) from error
