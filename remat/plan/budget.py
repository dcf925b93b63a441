"""What a user may write as a budget, a peak, or a link to a host."""

from __future__ import annotations

import re
from typing import Any

from remat._core import parse_bytes, warn_user
from remat.plan.solve import Problem, keep_all, least
from remat.transforms import BoundedCache, RematError, user_place


def check_budget(budget: Any) -> float | int | str:
    """A budget in its canonical form: a share (float), bytes (int) or "free".

    Raises:
        RematError: anything else; the message lists what can be written.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise RematError(
            f"A budget is a share, bytes or a text, got {_shown(budget)} of type {type(budget).__name__}. "
            + _WRITE
        )
    if isinstance(budget, str):
        return budget if budget == "free" else _parsed(budget, "budget", _WRITE)
    if isinstance(budget, float):
        if not 0.0 <= budget <= 1.0:
            raise RematError(
                f"A budget given as a float is a share from 0.0 to 1.0, got {budget!r}. {_WRITE}"
            )
        return budget
    if budget == 0:
        # Zero bytes can never be met; as a share it asks for the least.
        return 0.0
    if budget < 0:
        raise RematError(f"A budget in bytes cannot be negative, got {budget!r}. {_WRITE}")
    return budget


def check_peak(peak: Any) -> int:
    """A peak in bytes.

    Raises:
        RematError: anything but a positive int or a text such as "20GiB".
    """
    if isinstance(peak, str):
        peak = _parsed(peak, "peak", _WRITE_PEAK)
    if isinstance(peak, bool) or not isinstance(peak, int) or peak <= 0:
        raise RematError(f"A peak is a positive number of bytes, got {_shown(peak)}. {_WRITE_PEAK}")
    return peak


_WRITE_PEAK = 'Write peak="20GiB" or peak=20 * 2**30: the most bytes live at once in forward and backward.'
_WRITE = (
    'Write budget=0.4 (a share of what no remat keeps), budget=2 * 2**30 or "2GiB" (bytes), or budget="free" '
    "(the least memory at which no matmul, convolution or attention runs again)."
)


# Bytes/s that a copy between device and host attains in one direction, while the other is busy too.
LINKS = {"pcie4": 25e9, "pcie5": 55e9, "gh200": 380e9}


def check_link(link: Any) -> float:
    """Bytes per second of a link: a key of `LINKS`, or a number.

    Raises:
        RematError: anything else.
    """
    if isinstance(link, str) and link in LINKS:
        return LINKS[link]
    if isinstance(link, (int, float)) and not isinstance(link, bool) and link > 0:
        return float(link)
    raise RematError(
        f"A link is bytes per second or one of {', '.join(LINKS)}, got {link!r}: write link=55e9."
    )


def _shown(value: Any) -> str:
    """A plan given by mistake is many lines."""
    text = repr(value)
    return text if len(text) < 80 else f"{text[:60]}..."


def _parsed(text: str, what: str, advice: str) -> int:
    try:
        found = parse_bytes(text)
        # "0.4" would be no byte.
        wrong = not found and re.search("[1-9]", text) is not None
    except ValueError:
        found, wrong = 0, True
    if wrong:
        raise RematError(f"{text!r} is not a {what}. {advice}")
    return found


def resolve(budget: float | int | str, default: float, problem: Problem, what: str = "this region") -> int:
    """Bytes for one region, or for several as one problem; `default` are those that they keep without a plan.

    A share below the least possible means the least possible, with a warning; of exactly 0 without one.
    """
    if isinstance(budget, int):
        return budget
    # ("free": the problem was priced so that nothing heavy may run again.) Symbolic sizes are those at hand.
    floor, default = int(least(problem).bytes), int(default)
    if budget == 1.0:
        everything = keep_all(problem)
        return max(floor, default, int(everything.bytes) if everything else 0)
    wanted = 0 if isinstance(budget, str) else int(budget * default)
    if wanted < floor and not isinstance(budget, str) and budget > 0:
        warn_below_least(budget, floor, default, what)
    return max(wanted, floor)


def warn_below_least(budget: float, floor: int, default: int, what: str) -> None:
    """Say that a share cannot be met, once for a line of the user's: a loop may call ten such blocks."""
    said = budget, user_place()
    if said not in _below_least:
        _below_least[said] = None
        warn_user(
            f"A budget of {budget:.3g} is below the least {what} can keep, {floor:,} bytes "
            f"({floor / max(default, 1):.3g} of what is kept without a plan): planning for that. "
            "(Said once for this line.)"
        )


_below_least: BoundedCache[tuple[float, str | None], None] = BoundedCache(4096)
