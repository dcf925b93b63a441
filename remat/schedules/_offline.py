"""What a schedule is, and those for a chain whose length is known.

Binomial checkpointing:
    A. Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
    differentiation", Optimization Methods and Software 1 (1992); A. Griewank and A. Walther, "Algorithm 799:
    revolve", ACM TOMS 26 (2000). The recursive form is known as treeverse.
Two levels:
    T. Chen et al., "Training deep nets with sublinear memory cost", arXiv 1604.06174 (2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from remat.schedules._counts import Stats, counted
from remat.transforms import WrongType, WrongValue
from remat.transforms.scan import Action, Advance, Free, Restore, Reverse, Store


def beta(c: int, r: int) -> int:
    """The longest chain that `c` slots reverse with no step advanced more than `r` times: C(c + r, c)."""
    return math.comb(c + r, c) if r >= 0 else 0


def repetitions(n: int, c: int) -> int:
    """The least r with beta(c, r) >= n."""
    r = 0
    while beta(c, r) < n:
        r += 1
    return r


def advances(n: int, c: int) -> int:
    """t(n, c) = r n - C(c + r, r - 1): the least number of advances that reverse `n` steps with `c` slots.

    The initial state occupies one slot. The n - 1 advances of the primal sweep are counted, the n taped
    evaluations are not. (Griewank and Walther 2000, theorem 1, with the initial state counted as a slot.)
    That sweep stops before the last step. A scan's forward runs it too, as it returns the last carry, and
    keeps only `c` states. So it is the sweep of a chain one step longer, and its least number of recomputed
    steps is t(n + 1, c) - n.

    Example:
        >>> from remat.schedules import advances
        >>> advances(10, 3)
        15
    """
    if n < 1 or c < 1:
        raise WrongValue(f"advances: got n={n}, c={c}; at least one step and one slot are needed.")
    r = repetitions(n, c)
    return r * n - beta(c + 1, r - 1)


def split(n: int, c: int) -> int:
    """How far to advance before the next store: an m that attains min m + t(n - m, c - 1) + t(m, c).

    An m is optimal if it leaves the right part within beta(c - 1, r) and the left part within beta(c, r - 1).
    Neither part may fall below what the next smaller r could do.
    """
    r = repetitions(n, c)
    return max(beta(c, r - 2), n - beta(c - 1, r), 1)


class Schedule:
    """Which carries are kept and when steps are evaluated again; pure integers.

    Subclasses say where the primal sweep stores (`place`) and how far the reversal advances from a state
    before it stores the next one (`leap`).

    Example:
        >>> from remat.schedules import Revolve, Schedule
        >>> isinstance(Revolve(4), Schedule), Revolve(4).forward(10)
        (True, {0: 0, 1: 1, 5: 2, 8: 3})
    """

    def place(self, n: int | None) -> Callable[[int], int | None]:
        """The primal sweep's rule: step -> the slot its state goes to, or None."""
        raise NotImplementedError

    def _known(self, n: int | None) -> int:
        if n is None:
            raise WrongValue(
                f"{self} needs to know the number of steps; for a loop of unknown length take Online."
            )
        return n

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

    def forward(self, n: int) -> dict[int, int]:
        """Step -> slot, as the primal sweep leaves them: all that is kept until the reversal."""
        place, slots = self.place(n), {}
        for step in range(n):
            slot = place(step)
            if slot is not None:
                slots[slot] = step
        return {step: slot for slot, step in sorted(slots.items(), key=lambda item: item[1])}

    def actions(self, n: int, stored: dict[int, int]) -> Iterator[Action]:
        """Reverse `n` steps; `stored` maps step -> slot.

        The stored states form a stack. The interval between the topmost and what is already reversed is
        split as `leap` says, until one step is left to turn round.
        """
        stack = sorted(stored.items())
        taken = set(stored.values())
        idle = [s for s in range(self.capacity(n) - 1, -1, -1) if s not in taken]
        end, at = n, -1
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
        return counted(n, stored, self.actions(n, stored))

    def explain(self, n: int, *, state_bytes: int | None = None, tape_bytes: int | None = None) -> str:
        """Slots, advances and peak for `n` steps, as text.

        Example:
            >>> from remat.schedules import Revolve
            >>> print(Revolve(3).explain(10))
            Revolve(slots=3) over 10 steps
              slots        3 carries, and the working one
              advances     18 (10 in the forward pass, 8 again in the backward pass: 0.80 extra sweeps)
              evaluations  28 of the body: 10 forward, 18 backward
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


@dataclass(frozen=True)
class Binomial(Schedule):
    """`slots` carries, the initial one counted; what lies between two of them is reversed optimally."""

    slots: int

    def __post_init__(self) -> None:
        check_slots(self.slots)

    def leap(self, at: int, end: int, free: int) -> int:
        return split(end - at, free + 1)


@dataclass(frozen=True)
class Revolve(Binomial):
    """`slots` carries, the initial one counted; exactly t(n + 1, slots) advances, the proven optimum.

    Example:
        >>> from remat.schedules import Revolve
        >>> stats = Revolve(8).stats(100)
        >>> stats.slots, stats.recomputed
        (8, 148)
    """

    def capacity(self, n: int) -> int:
        return min(self.slots, n)

    def place(self, n: int | None) -> Callable[[int], int | None]:
        n = self._known(n)
        stores, at, slots = {0: 0}, 0, self.capacity(n)
        while len(stores) < slots:
            at += split(n + 1 - at, slots - len(stores) + 1)  # the last carry is a result: one step more
            if at >= n:
                break
            stores[at] = len(stores)
        return stores.get


@dataclass(frozen=True)
class All(Schedule):
    """Every carry: no step is advanced twice.

    Example:
        >>> from remat.schedules import All
        >>> stats = All().stats(100)
        >>> stats.slots, stats.recomputed
        (100, 0)
    """

    def capacity(self, n: int) -> int:
        return n

    def place(self, n: int | None) -> Callable[[int], int | None]:
        return lambda step: step

    def leap(self, at: int, end: int, free: int) -> int:
        return 1

    def in_blocks(self, size: int, n: int) -> Schedule | None:
        return Taped(size, self)


@dataclass(frozen=True)
class Sqrt(Schedule):
    """Two levels: every `every`-th carry (default: ceil(sqrt(n))), and all carries of the segment in work.

    About 2 sqrt(n) carries and less than one extra sweep.

    Attributes:
        every: distance between kept carries, in steps.

    Example:
        >>> from remat.schedules import Sqrt
        >>> stats = Sqrt().stats(100)
        >>> stats.slots, stats.recomputed
        (19, 81)
    """

    every: int | None = None

    def stride(self, n: int) -> int:
        return self.every or math.isqrt(max(n - 1, 0)) + 1

    def capacity(self, n: int) -> int:
        stride = self.stride(n)
        return min(n, -(-n // stride) + stride - 1)

    def place(self, n: int | None) -> Callable[[int], int | None]:
        n = self._known(n)
        stride = self.stride(n)
        last = (n - 1) // stride * stride
        stores = {step: i for i, step in enumerate([*range(0, last, stride), *range(last, n)])}
        return stores.get

    def leap(self, at: int, end: int, free: int) -> int:
        return 1

    def in_blocks(self, size: int, n: int) -> Schedule | None:
        return Segmented(-(-self.stride(n) // size) * size)


@dataclass(frozen=True)
class Multilevel(Revolve):
    """`device` carries on the device and `host` carries offloaded, with t(n + 1, device + host) advances.

    The oldest states live on the host. They are written once in the forward pass and read least often.

    Attributes:
        device: carries on the device.
        host: carries in pinned host memory.

    Example:
        >>> from remat.schedules import Multilevel
        >>> stats = Multilevel(device=2, host=6).stats(100)
        >>> stats.slots, stats.recomputed
        (8, 148)
    """

    slots: int = field(init=False, default=0)
    device: int = 1
    host: int = 0

    def __post_init__(self) -> None:
        if self.device < 0 or self.host < 0:
            raise WrongValue(
                f"Multilevel: got device={self.device}, host={self.host}; both must be at least 0."
            )
        object.__setattr__(self, "slots", self.device + self.host)
        check_slots(self.slots)

    def offloaded(self, slot: int) -> bool:
        """Whether `slot` lies on the host."""
        return slot < self.host


@dataclass(frozen=True)
class Segmented(Schedule):
    """Segments of `length` steps reversed with their whole tape; `outer` schedules the segments.

    Peak c S + length R. With `outer = All()` no step is evaluated more than twice.

    Attributes:
        length: steps in a segment.
        outer: the schedule of segments.

    Example:
        >>> from remat.schedules import Segmented
        >>> stats = Segmented(10).stats(100)
        >>> stats.slots, stats.recomputed
        (10, 0)
    """

    length: int
    outer: Schedule = field(default_factory=All)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise WrongValue(f"Segmented: got length={self.length}; a segment has at least one step.")

    def in_blocks(self, size: int, n: int) -> Schedule | None:
        return None if self.length % size else self

    def _count(self, n: int) -> int:
        return -(-n // self.length)

    def capacity(self, n: int) -> int:
        return self.outer.capacity(self._count(n))

    def place(self, n: int | None) -> Callable[[int], int | None]:
        outer = self.outer.place(None if n is None else self._count(n))
        return lambda step: None if step % self.length else outer(step // self.length)

    def actions(self, n: int, stored: dict[int, int]) -> Iterator[Action]:
        segments = {step // self.length: slot for step, slot in stored.items()}
        for action in self.outer.actions(self._count(n), segments):
            match action:
                case Advance(start, stop):
                    yield Advance(start * self.length, stop * self.length)
                case Reverse(start, stop):
                    yield Reverse(start * self.length, min(stop * self.length, n))
                case Store(start, slot):
                    yield Store(start * self.length, slot)
                case Restore(start, slot):
                    yield Restore(start * self.length, slot)
                case Free():
                    yield action


@dataclass(frozen=True)
class Taped(Segmented):
    """`All` in blocks of `length` steps: every carry is kept, in the tape of its block."""

    keeps_tapes = True


def as_schedule(checkpoints: object) -> Schedule:
    """`"all"`, `"sqrt"`, a number of carries or a schedule, as a schedule."""
    check_checkpoints(checkpoints)
    if isinstance(checkpoints, Schedule):
        return checkpoints
    if isinstance(checkpoints, int):
        return Revolve(checkpoints)
    return All() if checkpoints == "all" else Sqrt()


def check_checkpoints(checkpoints: object) -> None:
    """Raise unless `as_schedule` makes a schedule of it; Dynamo traces this."""
    if isinstance(checkpoints, str):
        if checkpoints not in ("all", "sqrt"):
            raise WrongValue(
                f"checkpoints: got {checkpoints!r}; write 'all', 'sqrt', 'auto', a number of carries or a "
                "schedule from remat.schedules."
            )
    elif not isinstance(checkpoints, Schedule):
        check_slots(checkpoints)


def check_slots(c: object) -> None:
    """Raise unless `c` is a number of slots."""
    if not isinstance(c, int) or isinstance(c, bool):
        raise WrongType(f"checkpoints: got {c!r}; a number of carries is an int.")
    if c < 1:
        raise WrongValue(f"checkpoints: got {c}; at least one carry must be kept, the initial one.")
