"""The instruction set of a checkpointing schedule.

A schedule reverses `n` steps `x[k+1] = step(x[k])` while keeping only some of the states `x[k]`. It is a
sequence of the five actions below; `verb` is the method of `backward.py` that executes it. Nothing
here or in a schedule touches a tensor, so that the counts a schedule promises can be tested as integers.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol


class Advance(NamedTuple):
    """Evaluate steps `start .. stop - 1` from the state in hand, keeping nothing but `x[stop]`."""

    start: int
    stop: int
    verb = "advance"


class Store(NamedTuple):
    """Copy the state in hand, `x[step]`, into `slot`."""

    step: int
    slot: int
    verb = "store"


class Restore(NamedTuple):
    """Take `x[step]` in hand from `slot`."""

    step: int
    slot: int
    verb = "restore"


class Free(NamedTuple):
    """Empty `slot`: its state is not read again."""

    slot: int
    verb = "free"


class Reverse(NamedTuple):
    """From `x[start]` in hand evaluate steps `start .. stop - 1` with their tape, then pull back through
    them."""

    start: int
    stop: int
    verb = "reverse"


Action = Advance | Store | Restore | Free | Reverse


class Schedule(Protocol):
    """What a scan asks of a schedule.

    `place(n)` gives, for the primal sweep, the slot that the state before each step goes to (None: nowhere);
    a slot given twice is overwritten. `forward(n)` is what it leaves: step -> slot.
    `in_blocks(size, n)` is the schedule with steps evaluated `size` at a time, None where that cannot be; one
    that `keeps_tapes` keeps what the blocks leave for their pull-back from the forward on.
    `actions(n, stored)` reverses the chain, given which step lies in which slot.
    """

    keeps_tapes: bool

    def place(self, n: int | None) -> Callable[[int], int | None]: ...
    def forward(self, n: int) -> dict[int, int]: ...
    def in_blocks(self, size: int, n: int) -> Schedule | None: ...
    def actions(self, n: int, stored: dict[int, int]) -> Iterator[Action]: ...


def with_notice(actions: Iterable[Action], expect: Callable[[int], None]) -> Iterator[Action]:
    """`actions`; `expect` is told the slot that is restored next, as soon as the last restored one was.

    Where the slot gets its state only later, it is told then: so that what lies there may be fetched at once.
    """
    rest, ahead = iter(actions), collections.deque[Action]()
    while True:
        # Up to the next `Restore`, or to the end.
        while not (ahead and isinstance(ahead[-1], Restore)) and (action := next(rest, None)) is not None:
            ahead.append(action)
        if not ahead:
            return
        slot = ahead[-1].slot if isinstance(ahead[-1], Restore) else None
        stores = sum(isinstance(action, Store) and action.slot == slot for action in ahead)
        while ahead:
            if slot is not None and stores == 0:
                expect(slot)
                slot = None
            action = ahead.popleft()
            yield action
            stores -= isinstance(action, Store) and action.slot == slot
