"""What one reversal of a schedule costs, counted by running it on integers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from remat.transforms.scan import Action


@dataclass(frozen=True)
class Stats:
    """Exact counts of one reversal of `n` steps.

    Attributes:
        n: steps.
        slots: most states in slots at one time, the initial state counted.
        advances: step evaluations without tape, those of the primal sweep (all n) and those of the reversal.
        recomputed: those of `advances` that the reversal does.
        taped: step evaluations with tape, each followed by its pull-back.
        tape: most steps whose tape is alive at one time.

    Example:
        >>> from remat.schedules import Revolve
        >>> Revolve(3).stats(10)
        Stats(n=10, slots=3, advances=18, recomputed=8, taped=10, tape=1)
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

    def __init__(self, n: int, stored: dict[int, int]) -> None:
        self.slots = {slot: step for step, slot in stored.items()}
        self.at, self.end = -1, n
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


def counted(n: int, stored: dict[int, int], actions: Iterable[Action]) -> Stats:
    """The counts of a reversal of `n` steps, given which step lies in which slot."""
    machine = _Counter(n, stored)
    for action in actions:
        getattr(machine, action.verb)(*action)
    assert machine.end == 0
    return Stats(n, machine.peak, n + machine.recomputed, machine.recomputed, machine.taped, machine.tape)
