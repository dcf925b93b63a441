"""Whether a function acts token by token: a few tokens alone against the same among their neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from remat.transforms import RematError, flatten, is_tensor, smooth, traits, user_line
from remat.transforms.compat import DispatchMode, unwrapped

Rows = list[torch.Tensor]
Span = tuple[int, int]  # the first token, and the first one that is not part of it


class _Ops(DispatchMode):
    """The ops of a run and their results; random numbers are those of a run before, of the same tokens."""

    def __init__(self, before: list[list[Any]], size: int, at: Span) -> None:
        super().__init__()
        self.ran: list[tuple[Any, list[Any], str]] = []
        self.drawn: list[list[Any]] = []
        self.before, self.size, self.at = iter(before), size, at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in flatten(out)[0] if is_tensor(t)]
        facts = traits(func)
        if facts.random:
            for mine, drawn in zip(tensors, next(self.before, ()), strict=False):
                mine.copy_(next(_of_tokens(drawn, mine, self.size, self.at), mine))
            self.drawn.append([t.clone() for t in tensors])
        if not facts.uninitialized:
            # Copies: what is written to later would be compared as it is then. (Views may be of weights.)
            self.ran.append((func, [t if facts.view else t.clone() for t in tensors], user_line()))
        return out


def check_tokens(
    name: str,
    run: Callable[[Rows], Any],
    part: Callable[[int, int], Rows],
    tokens: int,
    check: Callable[[Any, int], None],
) -> bool:
    """Raise if a function gives other results for some tokens alone than for a slice around them.

    Args:
        part: (start, stop) -> these tokens, of which `run` is the function.
        tokens: how many there are; at most six are looked at.
        check: is given results of several numbers of tokens, one of which no batch has, and these numbers.

    Returns:
        Whether the numbers tell: tokens that are zero, or like their neighbours, hide what mixes them.
    """
    size = min(tokens, 6)
    # Not in the middle: reversed, a middle is itself.
    spans = [(1, 3)] if size > 4 else [(0, 1), (1, 2)]
    starts = (0, (tokens - size) // 2, tokens - size)
    with torch.no_grad():
        start = next((s for s in starts if all([_told(part, s, size, at) for at in spans])), None)
        for at in spans:
            # Of copies, so that what writes to its arguments is not taken for what mixes tokens.
            first = start or 0
            with _Ops([], size, at) as whole:
                expected = run([t.clone() for t in part(first, first + size)])
            with _Ops(whole.drawn, size, at) as alone:
                found = run([t.clone() for t in part(first + at[0], first + at[1])])
            pairs = zip(flatten(expected)[0], flatten(found)[0], strict=False)
            if any(is_tensor(a) and _same(unwrapped(a), unwrapped(b), size, at) is False for a, b in pairs):
                raise RematError(_mixed(name, list(zip(whole.ran, alone.ran, strict=False)), size, at))
            check(expected, size)
            check(found, at[1] - at[0])
    return start is not None


def _told(part: Callable[[int, int], Rows], start: int, size: int, at: Span) -> bool:
    """Whether the tokens at the sides of a span are not zero, and not those at its ends."""
    sides = [(at[0] - 1, at[0]), (at[1], at[1] - 1)]
    pairs = [[part(start + i, start + i + 1) for i in side] for side in sides if 0 <= side[0] < size]
    return all(
        any([bool(unwrapped((a != b) & (a != 0)).any()) for a, b in zip(*pair, strict=True)])
        for pair in pairs
    )


def _mixed(name: str, ran: list[Any], size: int, at: Span) -> str:
    """What to say where results differ."""
    # Integers may count tokens (positions) and be right until floats read them.
    first = next(filter(None, [_where(ran, size, at, kind) for kind in (smooth, is_tensor)]), "it")
    return (
        f"{name}: {first} mixes tokens. {at[1] - at[0]} tokens alone have other results than in a slice of "
        f"{size}, so tiles would give other numbers than the whole. Take into the function what acts token "
        "by token alone, and hand what it reads of other tokens over by keyword."
    )


def _where(ran: list[Any], size: int, at: Span, kind: Callable[[Any], bool]) -> str | None:
    """The first op with other results of this kind, and its line."""
    for (func, outs, line), (other, mine, _) in ran:
        pairs = [(a, b) for a, b in zip(outs, mine, strict=False) if kind(a)]
        if func is not other or any(_same(a, b, size, at) is False for a, b in pairs):
            return f"{func}, at {line},"
    return None


def _same(whole: torch.Tensor, part: torch.Tensor, size: int, at: Span) -> bool | None:
    """Whether results for some tokens are those of the slice; None where shapes do not tell."""
    known = None
    for own in _of_tokens(whole, part, size, at):
        if smooth(part):
            near = torch.finfo(part.dtype).eps ** 0.5
            most = float(own.abs().nan_to_num(0.0, 0.0).max()) if own.numel() else 0.0
            known = bool(torch.isclose(part, own, near, near * most, equal_nan=True).all())
        else:
            known = torch.equal(part, own)
        if known:
            break
    return known


def _of_tokens(whole: torch.Tensor, part: torch.Tensor, size: int, at: Span) -> Iterator[torch.Tensor]:
    """What of a result for the slice may belong to the tokens; they may be one dimension with another."""
    count = at[1] - at[0]
    if whole.dim() != part.dim():
        return
    dims = [i for i in range(part.dim()) if whole.shape[i] != part.shape[i]]
    if any(whole.shape[i] * count != part.shape[i] * size for i in dims):
        return
    for inner in itertools.product((False, True), repeat=len(dims)):
        own = whole
        for i, inside in zip(dims, inner, strict=True):
            other = part.shape[i] // count
            shape, to = ((other, size), i + 1) if inside else ((size, other), i)
            own = own.unflatten(i, shape).narrow(to, at[0], count).flatten(i, i + 1)
        yield own
