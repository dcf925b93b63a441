"""Speeds of links to a host."""

from __future__ import annotations

from remat.transforms import RematError

# Bytes/s that a copy between device and host attains in one direction, while the other is busy too.
LINKS = {"pcie4": 25e9, "pcie5": 55e9, "gh200": 380e9}


def speed_of(link: str | float) -> float:
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
