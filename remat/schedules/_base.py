"""What all schedules share: the reversing loop, the counts, the printed explanation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remat.transforms.scan import Action, Advance, Free, Restore, Reverse, Store, execute


@dataclass(frozen=True)
class Stats:
    """Exact counts of one reversal of `n` steps.

    Attributes:
        n: steps.
        slots: most states in slots at one time, the initial state counted.
        advances: step evaluations without tape in the primal sweep (up to the state in hand) and the
            reversal together; Griewank and Walther's t(n, c).
        recomputed: those of `advances` that the reversal does.
        taped: step evaluations with tape, each followed by its pull-back.
        tape: most steps whose tape is alive at one time.
    """

    n: int
    slots: int
    advances: int
    recomputed: int
    taped: int
    tape: int

    @property
    def evaluations(self) -> int:
        """Evaluations of the body, forward and backward together."""
        return self.n + self.recomputed + self.taped

    @property
    def sweeps(self) -> float:
        """Recomputed steps per step: extra forward sweeps beside the taped one."""
        return self.recomputed / self.n if self.n else 0.0

    def peak_bytes(self, state: int, tape: int) -> int:
        """c * S + k * R for a carry of `state` bytes and a step's tape of `tape` bytes."""
        return self.slots * state + self.tape * tape


class _Counter:
    """A machine that counts, and that refuses a wrong schedule."""

    def __init__(self, n: int, stored: dict[int, int], at: int) -> None:
        self.slots = {slot: step for step, slot in stored.items()}
        self.at, self.end = at, n
        self.recomputed = self.taped = self.tape = 0
        self.peak = len(self.slots)

    def advance(self, start: int, stop: int) -> None:
        assert self.at == start < stop < self.end, (self.at, start, stop, self.end)
        self.recomputed += stop - start
        self.at = stop

    def store(self, step: int, slot: int) -> None:
        assert self.at == step and slot not in self.slots, (self.at, step, slot)
        self.slots[slot] = step
        self.peak = max(self.peak, len(self.slots))

    def restore(self, step: int, slot: int) -> None:
        assert self.slots[slot] == step, (self.slots, step, slot)
        self.at = step

    def free(self, slot: int) -> None:
        del self.slots[slot]

    def reverse(self, start: int, stop: int) -> None:
        assert self.at == start and stop == self.end, (self.at, start, stop, self.end)
        self.taped += stop - start
        self.tape = max(self.tape, stop - start)
        self.end, self.at = start, -1


class Schedule:
    """Which carries are kept and when steps are evaluated again; pure integers.

    Subclasses say where the primal sweep stores (`place`) and how far the reversal advances from a state
    before it stores the next one (`leap`).
    """

    def place(self, n: int | None) -> Callable[[int], int | None]:
        """The primal sweep's rule: step -> the slot its state goes to, or None."""
        raise NotImplementedError

    def leap(self, at: int, end: int, free: int) -> int:
        """Steps to advance from `at` before storing, when steps `at .. end - 1` remain and `free` slots are
        empty."""
        raise NotImplementedError

    def capacity(self, n: int) -> int:
        """Slots this schedule may use for `n` steps, the initial state's counted."""
        raise NotImplementedError

    # Whether what compiled blocks of steps leave for their pull-back is kept from the forward on.
    keeps_tapes = False

    def in_blocks(self, size: int, n: int) -> Schedule | None:
        """This schedule with `n` steps evaluated `size` at a time, None where it needs them one by one."""
        return None

    def hand(self, n: int) -> int:
        """The step whose state is still in hand after the primal sweep."""
        return n - 1

    def forward(self, n: int, *, last: bool = False) -> dict[int, int]:
        """Step -> slot, as the primal sweep leaves them.

        The state before the last step stays in hand and needs no slot: a store is decided on only once it
        is known that another step follows. `last` places it all the same, as equinox does.
        """
        place, slots = self.place(n), {}
        for step in range(n if last else n - 1):
            slot = place(step)
            if slot is not None:
                slots[slot] = step
        return {step: slot for slot, step in sorted(slots.items(), key=lambda item: item[1])}

    def actions(self, n: int, stored: dict[int, int], in_hand: bool = True) -> Iterator[Action]:
        """Reverse `n` steps; `stored` maps step -> slot; `in_hand`: the state before the last step is at
        hand.

        The stored states form a stack. The interval between the topmost and what is already reversed is
        split as `leap` says, until one step is left to turn round.
        """
        stack = sorted(stored.items())
        taken = set(stored.values())
        idle = [s for s in range(self.capacity(n) - 1, -1, -1) if s not in taken]
        end, at = n, n - 1 if in_hand else -1
        while end > 0:
            if at < 0:
                at, slot = stack[-1]
                yield Restore(at, slot)
            if stack and stack[-1][0] == end - 1:  # its last use: give the slot back before the tape grows
                idle.append(stack.pop()[1])
                yield Free(idle[-1])
            if at == end - 1:
                yield Reverse(at, end)
                end, at = at, -1
                continue
            stop = at + self.leap(at, end, len(idle)) if idle else end - 1
            yield Advance(at, stop)
            at = stop
            if at < end - 1:  # a state that is turned round at once needs no slot
                stack.append((at, idle.pop()))
                yield Store(*stack[-1])

    def stats(self, n: int) -> Stats:
        """Exact counts, by running the schedule on integers (time proportional to the number of actions)."""
        if n == 0:
            return Stats(0, 0, 0, 0, 0, 0)
        stored = self.forward(n)
        machine = _Counter(n, stored, self.hand(n))
        execute(self.actions(n, stored), machine)
        assert machine.end == 0
        advances = machine.recomputed + self.hand(n)
        return Stats(n, machine.peak, advances, machine.recomputed, machine.taped, machine.tape)

    def explain(self, n: int, *, state_bytes: int | None = None, tape_bytes: int | None = None) -> str:
        """Slots, advances and peak for `n` steps, as text.

        Example:
            >>> from remat.schedules import Revolve
            >>> print(Revolve(3).explain(10))
            Revolve(slots=3) over 10 steps
              slots        3 carries, and the working one
              advances     15 (9 in the forward pass, 6 again in the backward pass: 0.60 extra sweeps)
              evaluations  26 of the body: 10 forward, 16 backward
              peak         3 S + 1 R (S: bytes of a carry, R: bytes of a step's tape)
        """
        stats = self.stats(n)
        peak = f"{stats.slots} S + {stats.tape} R (S: bytes of a carry, R: bytes of a step's tape)"
        if state_bytes is not None and tape_bytes is not None:
            peak += f" = {stats.peak_bytes(state_bytes, tape_bytes):,} bytes"
        again = stats.recomputed
        return "\n".join(
            [
                f"{self} over {n} steps",
                f"  slots        {stats.slots} carries, and the working one",
                f"  advances     {stats.advances} ({stats.advances - again} in the forward pass, {again} "
                f"again in the backward pass: {stats.sweeps:.2f} extra sweeps)",
                f"  evaluations  {stats.evaluations} of the body: {n} forward, {again + stats.taped} "
                f"backward",
                f"  peak         {peak}",
            ]
        )
