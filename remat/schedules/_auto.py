"""The schedule that a budget of bytes allows."""

from __future__ import annotations

import math

from remat.schedules._offline import Revolve, Schedule, Segmented, advances
from remat.transforms import WrongValue


def auto(n: int, budget: int, state_bytes: int, tape_bytes: int) -> Schedule:
    """The schedule of least recomputation with c S + k R <= budget.

    Segments of k steps are taped whole and c segment starts are kept by `Revolve`; the advances are then
    k t(ceil(n / k) + 1, c) exactly. Only the smallest k of each segment count can be best, so that O(sqrt(n))
    candidates settle it.

    Args:
        n: steps.
        budget: bytes for kept carries and tapes.
        state_bytes: S, bytes of a carry.
        tape_bytes: R, bytes that the backward of one step keeps.

    Raises:
        RematError: (also a `ValueError`) where not even one carry and one step's tape fit.

    Example:
        >>> from remat.schedules import auto
        >>> auto(100, budget=4096, state_bytes=64, tape_bytes=256)
        Segmented(length=2, outer=Revolve(slots=50))
    """
    best: tuple[int, int, int] | None = None
    for k in _lengths(n):
        count = -(-n // k)
        c = count if state_bytes == 0 else min(count, (budget - k * tape_bytes) // state_bytes)
        if c < 1 or k * tape_bytes + c * state_bytes > budget:
            continue
        again = k * (advances(count + 1, c) - count)
        best = min(best or (again, k, c), (again, k, c))
    if best is None:
        need = state_bytes + tape_bytes
        raise WrongValue(
            f"checkpoints='auto': a budget of {budget:,} bytes cannot hold one carry ({state_bytes:,}) and "
            f"one step's tape ({tape_bytes:,}); at least {need:,} are needed."
        )
    _, k, c = best
    return Revolve(c) if k == 1 else Segmented(k, Revolve(c))


def _lengths(n: int) -> list[int]:
    """The smallest k for each value of ceil(n / k)."""
    small = range(1, math.isqrt(n) + 1)
    return sorted({*small, *(-(-n // count) for count in small)})
