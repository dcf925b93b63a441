"""Names that a policy asks for and that no value of a region bears."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable

from remat.policies._base import Policy
from remat.transforms import RematError, is_user_frame

# Regions and names that were warned of: a model calls its regions thousands of times.
_warned: set[tuple[str, str]] = set()


class UnmatchedName(UserWarning):
    """A name in a policy that no `checkpoint_name` of the region gives."""


def report_unmatched(policy: Policy, region: str, seen: Iterable[str]) -> None:
    """Warn, once for a region, of names that `policy` asks for and that did not occur in the forward.

    Raises:
        RematError: a policy with `strict=True` asks for the name.
    """
    missing = {name: strict for name, strict in policy.names() if name not in seen}
    if not missing:
        return
    text = f"Policy {policy!r} of region {region!r} asks for {_listed(missing, seen)}"
    if any(missing.values()):
        raise RematError(text)
    new = {(region, name) for name in missing} - _warned
    _warned.update(new)
    if new:
        warnings.warn(f"{text} (Said once; strict=True makes it an error.)", UnmatchedName, _user_level())


def _listed(missing: Iterable[str], seen: Iterable[str]) -> str:
    occurred = ", ".join(map(repr, sorted(seen)))
    found = f"the names that do are {occurred}" if occurred else "no checkpoint_name was called in it"
    guesses = {name: difflib.get_close_matches(name, seen, 1, 0.5) for name in missing}
    hints = [f" Did you mean {guess[0]!r} for {name!r}?" for name, guess in guesses.items() if guess]
    asked = ", ".join(map(repr, guesses))
    return f"{asked}, which names no value of it: {found}.{''.join(hints)}"


def _user_level() -> int:
    """The `stacklevel` of the user's line that called the region, seen from `report_unmatched`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_user_frame(frame):
        frame, level = frame.f_back, level + 1
    return level
