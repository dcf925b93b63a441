"""The pull-back of a scan: a schedule's actions, executed on tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from remat.transforms.closure import Missed
from remat.transforms.compat import in_transform, is_batched_anyhow
from remat.transforms.errors import RematError
from remat.transforms.scan.body import Leaves
from remat.transforms.scan.compiled import MOST, Bound, Sums, dense
from remat.transforms.scan.instructions import execute
from remat.transforms.scan.spec import Scan, State, Tensors, as_in_forward, compact, numbered
from remat.transforms.scan.vjp import OneByOne, pull


class _Reversal:
    """The machine that executes a schedule's actions on tensors."""

    def __init__(
        self, scan: Scan, flat: Tensors, states: dict[int | None, State], needs: Sequence[bool]
    ) -> None:
        self.scan, self.slots = scan, states
        self.consts, _, self.xs = scan.split(flat)
        a, b, _ = scan.sizes
        self.needs = list(needs[:a]), list(needs[a : a + b]), list(needs[a + b :])
        self.devices = scan.split(flat)[1]
        self.hand = states.pop(None, State(0, [], None))
        self.blocks: Bound | None = scan.blocks.at(self.consts) if scan.in_blocks else None
        self.tapes = scan.record.tapes
        needs_of = self.needs[0], self.needs[2]
        self.one = None if in_transform() else OneByOne(self.consts, needs_of)
        if self.blocks is not None:
            self.xs = dense(self.xs)
            self.device = flat[scan.sizes[0]].device
        self.const_grads: list[torch.Tensor | None] = [None] * a
        self.owned = [False] * a
        self.x_grads: list[torch.Tensor | None] = [None] * len(self.xs)
        self.x_rows: dict[int, dict[int, torch.Tensor]] = {}
        self.carry_cts: list[torch.Tensor | None] = []
        self.y_cts: list[torch.Tensor | None] = []

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
                if self.scan.on_step is not None:
                    for k in range(start, end):
                        self.scan.on_step("advance", k)
                start = end
            for k in range(start, stop):
                carry, _ = numbered(self.scan, k, self.consts, carry, self._x(k))
                if self.scan.on_step is not None:
                    self.scan.on_step("advance", k)
        drew = self.scan.record.random and self.hand.random is not None
        self.hand = State(stop, carry, self.hand.random.again() if drew else None)  # type: ignore[union-attr]

    def store(self, step: int, slot: int) -> None:
        moved = self.scan.moved(compact(self.hand.carry), slot)
        self.slots[slot] = State(step, moved, self.hand.random)

    def restore(self, step: int, slot: int) -> None:
        state = self.slots[slot]
        self.hand = State(step, self.scan.moved(state.carry, slot, self.devices), state.random)

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
        if stop == start + 1 and self.one is not None:
            self._reverse_one(self.one, start)
            return
        scan, carry, rows = self.scan, self.hand.carry, [self._x(k) for k in range(start, stop)]
        cts = [
            [None if ct is None else ct.select(0, scan.at(k)) for ct in self.y_cts]
            for k in range(start, stop)
        ]
        self.hand = State(start, [], None)  # the tape holds what it needs of the carry

        def steps(consts: Tensors, carry: Leaves, rows: list[list[torch.Tensor]]) -> tuple[Leaves, list[Any]]:
            ys = []
            for k, x in enumerate(rows, start):
                carry, y = numbered(scan, k, consts, carry, x)
                ys.append(y)
            return carry, ys

        grads = pull(steps, self.consts, carry, rows, self.carry_cts, cts, (self.needs[0], self.needs[2]))
        self.carry_cts = grads[1]
        self._add_consts(grads[0])
        for k, row in zip(range(start, stop), grads[2], strict=True):
            self._put(scan.at(k), row)
        self._say_reversed(start, stop)

    def _reverse_one(self, pull_one: OneByOne, k: int) -> None:
        scan, carry, at = self.scan, self.hand.carry, self.scan.at(k)
        cts = [*self.carry_cts, *(None if ct is None else ct.select(0, at) for ct in self.y_cts)]
        self.hand = State(k, [], None)
        step = functools.partial(numbered, scan, k)
        by_const, self.carry_cts, (by_x,) = pull_one(step, carry, self._x(k), cts)
        self._add_consts(by_const)
        self._put(at, by_x)
        self._say_reversed(k, k + 1)

    def _rows(self, xs: Tensors, start: int, stop: int) -> Sequence[Sequence[torch.Tensor]]:
        """The rows of the blocks of these steps."""
        assert self.blocks is not None
        return self.blocks.rows(self.scan.block(xs, start, stop - start), (stop - start) // self.blocks.size)

    def _reverse_blocks(self, blocks: Bound, start: int, stop: int) -> None:
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
            self.hand = State(rest, self._ends(tapes[-1]), None)
            self._reverse_steps(rest, stop)
        self.hand = State(start, [], None)
        if self.scan.on_step is not None:
            most = size
        for low in range(start + (rest - start - 1) // most * most, start - 1, -most):
            self._pull_blocks(blocks, first, tapes, low, min(low + most, rest))

    def _ends(self, tape: Sequence[torch.Tensor] | None) -> Leaves:
        """The carry after a block."""
        assert tape is not None
        return [t.select(0, -1).to(self.device) for t in tape[: len(self.devices)]]

    def _pull_blocks(self, blocks: Bound, first: Leaves, tapes: list[Any], start: int, stop: int) -> None:
        """Pull back through the blocks of these steps, the last ones that have tapes; `first`: the carry
        before the first one that has."""
        at = [i for i, ct in enumerate(self.y_cts) if ct is not None]
        given = dense([ct for ct in self.y_cts if ct is not None])
        rows, y_rows = list(self._rows(self.xs, start, stop)), list(self._rows(given, start, stop))
        y_cts: list[Any] = [None] * len(self.y_cts)
        needs, sums, found = (self.needs[0], self.needs[2]), Sums(self.consts, self.const_grads), []
        while rows:
            tape = tapes.pop()
            if tape is not None:
                tape = [t.to(self.device) for t in tape]
            carry = self._ends(tapes[-1]) if tapes else first
            for i, ct in zip(at, y_rows.pop(), strict=True):
                y_cts[i] = ct
            cts = self.carry_cts, y_cts
            self.carry_cts, by_x = blocks.pull(carry, rows.pop(), tape, cts, needs, sums)
            found.append(by_x)
        self.const_grads = sums.result()
        for i, parts in enumerate(zip(*found, strict=True)):
            if parts[0] is not None:
                out = self.scan.block([self._x_grad(i)], start, stop - start)[0]
                torch.cat(parts if self.scan.reverse else parts[::-1], out=out)
        self._say_reversed(start, stop)

    def _say_reversed(self, start: int, stop: int) -> None:
        if self.scan.on_step is not None:
            for k in range(stop - 1, start - 1, -1):
                self.scan.on_step("reverse", k)

    def _x_grad(self, i: int) -> torch.Tensor:
        found = self.x_grads[i]
        if found is None:
            found = torch.zeros_like(self.xs[i], memory_format=torch.contiguous_format)
            self.x_grads[i] = found
        return found

    def _add_consts(self, grads: list[torch.Tensor | None]) -> None:
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            total = self.const_grads[i]
            if total is None:
                self.const_grads[i] = grad
            elif self.owned[i] and not is_batched_anyhow(grad):
                total.add_(grad)
            else:  # the first gradient may be an alias of a cotangent: not ours to write into
                self.const_grads[i], self.owned[i] = total + grad, True

    def _put(self, at: int, row: list[torch.Tensor | None]) -> None:
        for i, grad in enumerate(row):
            if grad is None:
                continue
            if is_batched_anyhow(grad):  # batched cotangents: rows are kept apart and stacked at the end
                self.x_rows.setdefault(i, {})[at] = grad
                continue
            self._x_grad(i).select(0, at).copy_(grad)

    def grads(self) -> list[torch.Tensor | None]:
        for i, rows in self.x_rows.items():
            zero = torch.zeros_like(self.xs[i].select(0, 0))
            self.x_grads[i] = torch.stack([rows.get(at, zero) for at in range(self.scan.length)])
        return [*self.const_grads, *self.carry_cts, *self.x_grads]


def pull_back(
    scan: Scan,
    flat: Tensors,
    states: dict[int | None, State],
    needs: Sequence[bool],
    cts: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Gradients of `flat` (None: zero or not needed) from the cotangents of the carry's tensors and of ys."""
    machine = _Reversal(scan, flat, states, needs)
    count = len(scan.tensors)
    machine.carry_cts, machine.y_cts = list(cts[:count]), list(cts[count:])
    stored = {state.step: slot for slot, state in states.items() if slot is not None}
    try:
        with torch.no_grad(), as_in_forward(scan):
            if not machine.all_taped():
                execute(scan.schedule.actions(scan.length, stored), machine)
    except Missed as missed:
        raise RematError(
            f"{scan.name}: evaluated again, the body reads a tensor ({tuple(missed.tensor.shape)}) that it "
            "did not read in the forward; its gradient would be lost. A global or attribute that changes "
            "between forward and backward must be an argument: put it in the carry or in xs."
        ) from None
    grads = machine.grads()
    return [g if need else None for g, need in zip(grads, needs, strict=True)]
