"""Names that a policy asks for and that no value of a region bears."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from remat._core import warn_user
from remat.policies._base import Policy
from remat.transforms import BoundedCache, RematError

# Regions and names that were warned of: a model calls its regions thousands of times.
_warned: BoundedCache[tuple[str, str], None] = BoundedCache(4096)


class UnmatchedName(UserWarning):
    """A name in a policy that no `checkpoint_name` of the region gives. Told once for a region.

    Example:
        >>> import warnings
        >>> import torch
        >>> from remat import remat, save_names
        >>> block = remat(torch.sin, policy=save_names("hiden"))
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     out = block(torch.ones(2, requires_grad=True))
        >>> [w.category.__name__ for w in told]
        ['UnmatchedName']
    """


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
    new = {(region, name): None for name in missing if (region, name) not in _warned}
    _warned.update(new)
    if new:
        warn_user(f"{text} (Said once; strict=True makes it an error.)", UnmatchedName)


def _listed(missing: Iterable[str], seen: Iterable[str]) -> str:
    occurred = ", ".join(map(repr, sorted(seen)))
    found = f"the names that do are {occurred}" if occurred else "no checkpoint_name was called in it"
    guesses = {name: difflib.get_close_matches(name, seen, 1, 0.5) for name in missing}
    hints = [f" Did you mean {guess[0]!r} for {name!r}?" for name, guess in guesses.items() if guess]
    asked = ", ".join(map(repr, guesses))
    return f"{asked}, which names no value of it: {found}.{''.join(hints)}"
