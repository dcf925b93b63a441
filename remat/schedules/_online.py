"""Schedules for a chain whose length is not known in advance.

    P. Stumm and A. Walther, "New algorithms for optimal online checkpointing", SIAM J. Sci. Comput. 32
    (2010):
    algorithm I, optimal while n < (c + 1)(c + 2) / 2 (with the last step counted as in `advances`).
    Q. Wang, P. Moin and G. Iaccarino, "Minimal repetition dynamic checkpointing algorithm for unsteady
    adjoint calculation", SIAM J. Sci. Comput. 31 (2009): for what comes after.

The switch between the two where the first ends follows equinox (equinox/internal/_loop/checkpointed.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from remat.schedules._offline import Binomial


class _StummWalther:
    """Algorithm I. Blocks shrink: the first is c long, each later one a step shorter. Its states overwrite
    the slots of the block before, so every step is advanced at most twice."""

    def __init__(self, c: int) -> None:
        self.slot, self.block, self.turn, self.saving = 0, c, c, True

    def __call__(self, step: int) -> int | None:
        slot = self.slot if self.saving else None
        if self.saving:
            self.slot = 1 if self.slot + 1 > self.block else self.slot + 1
        if step + 1 == self.turn:
            self.saving = False
        if step == self.turn:
            self.turn += self.block
            self.block -= 1
            self.slot = self.block
            self.saving = self.block > 0
        return slot


class _WangMoin:
    """A stored state has a level; one that lies before a state of higher level is dispensable. The newest
    dispensable state makes room; where there is none, the newest state does, and its successor's level
    rises."""

    def __init__(self, steps: dict[int, int]) -> None:
        self.steps = steps  # slot -> step, shared with the controller
        self.levels = dict.fromkeys(steps, 0) | {0: math.inf}  # the initial state is never overwritten
        self.dispensable: set[int] = set()

    def __call__(self, step: int) -> int | None:
        if len(self.steps) == 1:
            return None
        if self.dispensable:
            slot = max(self.dispensable, key=self.steps.__getitem__)
            self.dispensable.remove(slot)
            self.levels[slot] = 0
            return slot
        slot = max(self.steps, key=self.steps.__getitem__)
        level = self.levels[slot]
        self.dispensable |= {s for s in self.steps if self.levels[s] < level}
        self.levels[slot] = level + 1
        return slot


@dataclass(frozen=True)
class Online(Binomial):
    """`slots` carries for a loop of unknown length: as `Revolve` while n < (c + 1)(c + 2) / 2.

    Attributes:
        slots: carries kept, the initial one counted.

    Example:
        >>> from remat.schedules import Online
        >>> stats = Online(8).stats(100)
        >>> stats.slots, stats.recomputed
        (8, 198)
    """

    def capacity(self, n: int) -> int:
        return self.slots

    def place(self, n: int | None) -> Callable[[int], int | None]:
        steps: dict[int, int] = {}
        rule: Callable[[int], int | None] = _StummWalther(self.slots)
        limit = (self.slots + 1) * (self.slots + 2) // 2 - 1

        def slot(step: int) -> int | None:
            nonlocal rule
            if step == limit:
                rule = _WangMoin(steps)
            chosen = rule(step)
            if chosen is not None:
                steps[chosen] = step
            return chosen

        return slot
