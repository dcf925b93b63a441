"""What a region's function returned, compared between its runs where their ops cannot be.

Torch leaves out tangents known to be zero, by rules that differ between the passes. So under forward-mode
derivatives a recomputation is not held against a tape (`Tape.loose`): what it returns is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from remat.transforms.compat import (
    JVP,
    VMAP,
    functions_as_they_are,
    interpreter,
    level_of,
    levels,
    tangent_of,
    unwrap_batched,
    unwrap_for_grad,
)
from remat.transforms.context import untracked
from remat.transforms.errors import RematError, not_repeated
from remat.transforms.functorch.primitive import Family
from remat.transforms.state import Fingerprint, alike, fingerprints_of
from remat.transforms.tape import Recorded

# Which derivative a tensor is: the forward-mode levels whose tangent it is, counted from the innermost.
Order = tuple[int, ...]
Parts = dict[Order, Sequence[torch.Tensor | None]]
Prints = dict[Order, list[Fingerprint | None]]


class Results:
    """What the first run of one call returned; `met` holds every other run against that."""

    def __init__(self, family: Family) -> None:
        self.region, self.casts = family.region, family.ambient.casts
        self.levels = 0  # of forward mode, around the first run
        self.before: Prints | None = None

    def met(self, outs: Sequence[torch.Tensor]) -> None:
        """The function returns `outs`, under the levels at hand."""
        around = [number for number, kind, _ in levels() if kind == JVP][::-1]
        with torch.no_grad(), functions_as_they_are():
            parts = untracked(_below, {(): outs}, around)
            found = {order: [_print(t) for t in tensors] for order, tensors in parts.items()}
        if self.before is None:
            self.before, self.levels = found, len(around)
            return
        # A pull-back that outlives a level of the forward has no tangents of that level. What it is given may
        # have tangents of its own, by levels around those of the forward.
        known = range(self.levels) if len(around) >= self.levels else range(0)
        for order in sorted(self.before.keys() | found.keys()):
            if all(at in known for at in order) and not self._alike(self.before, found, order):
                what = "it returned other numbers" if not order else "it returned other tangents"
                raise RematError(not_repeated(self.region.name, what))

    def _alike(self, before: Prints, found: Prints, order: Order) -> bool:
        count = len(before[()])
        pairs = zip(before.get(order, [None] * count), found.get(order, [None] * count), strict=False)
        full = [(a or _zero(b), b or _zero(a)) for a, b in pairs if a is not None or b is not None]
        # (Another derivative may evaluate other shapes: those of a batch.)
        full = [(a, b) for a, b in full if a.shape == b.shape and a.dtype == b.dtype]
        return alike([a for a, _ in full], [b for _, b in full], self.casts)


def compared(family: Family, recorded: Recorded, outs: Sequence[torch.Tensor]) -> Results | None:
    """What later runs of a family's function are held against, now that the first one is over."""
    if not family.region.compares_results(bool(recorded.draws)):
        return None
    results = family.results
    if results is None:  # forward mode inside the function, and none around it
        results = Results(family)
        with functions_as_they_are():
            results.before = {(): [_print(t) for t in outs]}
    return results


def _below(parts: Parts, around: list[int]) -> Parts:
    """The same below all levels: primals and tangents apart, batches whole."""
    level = interpreter()
    if level is None:
        return parts
    number, kind = level.level(), level.key()
    found: Parts = {}
    for order, tensors in parts.items():
        if kind == VMAP:
            found[order] = [None if t is None else unwrap_batched(t, number)[0] for t in tensors]
            continue
        if kind == JVP:
            made = [None if t is None or level_of(t) != number else tangent_of(t) for t in tensors]
            if any(t is not None for t in made):
                found[(*order, around.index(number))] = _lowered(made, number)
        found[order] = _lowered(tensors, number)
    with level.lower():
        return _below(found, around)


def _lowered(tensors: Sequence[torch.Tensor | None], number: int) -> list[torch.Tensor | None]:
    return [None if t is None else unwrap_for_grad(t, number) for t in tensors]


def _print(tensor: torch.Tensor | None) -> Fingerprint | None:
    """That of a float tensor with numbers; a tangent known to be zero has no memory."""
    if tensor is None or tensor._is_zerotensor():
        return None
    return next(iter(fingerprints_of([tensor])), None)


def _zero(like: Fingerprint | None) -> Fingerprint:
    assert like is not None
    return Fingerprint(like.shape, like.dtype, 0.0, [0.0] * len(like.some))
