"""Schedules for a chain whose length is known.

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

from remat.schedules._base import Schedule
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

    The initial state occupies one slot; the n - 1 advances of the primal sweep are counted, the n taped
    evaluations are not (Griewank and Walther 2000, theorem 1, with the initial state counted as a slot).

    Example:
        >>> advances(10, 3)
        15
    """
    if n < 1 or c < 1:
        raise ValueError(f"advances: got n={n}, c={c}; at least one step and one slot are needed.")
    r = repetitions(n, c)
    return r * n - beta(c + 1, r - 1)


def split(n: int, c: int) -> int:
    """How far to advance before the next store: an m that attains min m + t(n - m, c - 1) + t(m, c).

    Optimal are exactly the m that leave the right part within beta(c - 1, r) and the left part within
    beta(c, r - 1) without letting either fall below what the next smaller r could do.
    """
    r = repetitions(n, c)
    return max(beta(c, r - 2), n - beta(c - 1, r), 1)


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
    """`slots` carries, the initial one counted; exactly t(n, slots) advances, the proven optimum."""

    def capacity(self, n: int) -> int:
        return min(self.slots, n)

    def place(self, n: int | None) -> Callable[[int], int | None]:
        if n is None:
            raise ValueError(
                f"{self} needs to know the number of steps; for a loop of unknown length take Online."
            )
        stores, at, slots = {0: 0}, 0, self.capacity(n)
        while len(stores) < slots:
            at += split(n - at, slots - len(stores) + 1)
            if at >= n - 1:
                break
            stores[at] = len(stores)
        return stores.get


@dataclass(frozen=True)
class All(Schedule):
    """Every carry: no step is advanced twice."""

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
    """

    every: int | None = None

    def stride(self, n: int) -> int:
        return self.every or math.isqrt(max(n - 1, 0)) + 1

    def capacity(self, n: int) -> int:
        stride = self.stride(n)
        return min(n, -(-n // stride) + stride - 1)

    def place(self, n: int | None) -> Callable[[int], int | None]:
        if n is None:
            raise ValueError(
                f"{self} needs to know the number of steps; for a loop of unknown length take Online."
            )
        stride = self.stride(n)
        last = (n - 1) // stride * stride
        stores = {step: i for i, step in enumerate([*range(0, last, stride), *range(last, n - 1)])}
        return stores.get

    def leap(self, at: int, end: int, free: int) -> int:
        return 1

    def in_blocks(self, size: int, n: int) -> Schedule | None:
        return Segmented(-(-self.stride(n) // size) * size)


@dataclass(frozen=True)
class Multilevel(Revolve):
    """`device` carries on the device and `host` carries offloaded, with t(n, device + host) advances.

    The oldest states live on the host: they lie at the bottom of the stack, are written once in the forward
    pass and read least often.
    """

    slots: int = field(init=False, default=0)
    device: int = 1
    host: int = 0

    def __post_init__(self) -> None:
        if self.device < 0 or self.host < 0:
            raise ValueError(
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
    """

    length: int
    outer: Schedule = field(default_factory=All)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"Segmented: got length={self.length}; a segment has at least one step.")

    def in_blocks(self, size: int, n: int) -> Schedule | None:
        return None if self.length % size else self

    def _count(self, n: int) -> int:
        return -(-n // self.length)

    def capacity(self, n: int) -> int:
        return self.outer.capacity(self._count(n))

    def hand(self, n: int) -> int:
        return self.outer.hand(self._count(n)) * self.length

    def place(self, n: int | None) -> Callable[[int], int | None]:
        outer = self.outer.place(None if n is None else self._count(n))
        return lambda step: None if step % self.length else outer(step // self.length)

    def actions(self, n: int, stored: dict[int, int], in_hand: bool = True) -> Iterator[Action]:
        segments = {step // self.length: slot for step, slot in stored.items()}
        for action in self.outer.actions(self._count(n), segments, in_hand):
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


def check_slots(c: object) -> None:
    """Raise unless `c` is a number of slots."""
    if not isinstance(c, int) or isinstance(c, bool):
        raise TypeError(f"checkpoints: got {c!r}; a number of carries is an int.")
    if c < 1:
        raise ValueError(f"checkpoints: got {c}; at least one carry must be kept, the initial one.")
