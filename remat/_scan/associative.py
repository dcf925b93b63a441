"""`associative_scan_remat`: `jax.lax.associative_scan` for PyTorch, whose backward keeps few values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from remat._core import described
from remat._region import with_policy
from remat._scan.scan import scan_remat
from remat.policies import save_nothing
from remat.transforms import RematError, WrongType, flatten, unflatten
from remat.transforms.scan import name_of, rows_of, version

T = TypeVar("T")
Leaves = list[torch.Tensor]


def associative_scan_remat(combine: Callable[[T, T], T], xs: T, *, reverse: bool = False) -> T:
    """All prefixes of `xs` under an associative function, in logarithmic depth.

    As `jax.lax.associative_scan`: row k of the result is x[0] . x[1] . ... . x[k]. State-space layers and
    linear recurrences are written in it. The forward combines about sqrt(length) chunks side by side. Between
    the passes it keeps one value for each chunk, beside `xs`, and the backward works on one chunk at a time.
    Composes with plain autograd (double backward too), with every `torch.func` transform, and with
    `torch.compile`, where it is one loop.

    Args:
        combine: an associative function of two elements. It is called on many pairs at once: its operands
            have a leading axis of any length, and it acts on each row alone. What it closes over is
            differentiated. It draws no random numbers.
        xs: a pytree of tensors of shape [length, ...].
        reverse: combine from the last row to the first: row k is x[length - 1] . ... . x[k].

    Returns:
        A pytree like `xs`, of the same shapes and dtypes.

    Raises:
        RematError: (also a `TypeError`) leaves that are not tensors, or a result of another structure, shape
            or dtype than the operands'.
        RematError: a `combine` that writes into an operand.

    Example:
        >>> import torch
        >>> from remat import associative_scan_remat
        >>> def combine(left, right):  # h = a * h + b
        ...     return left[0] * right[0], right[0] * left[1] + right[1]
        >>> a, b = torch.full((5,), 0.5), torch.ones(5)
        >>> associative_scan_remat(combine, (a, b))[1]
        tensor([1.0000, 1.5000, 1.7500, 1.8750, 1.9375])
    """
    name = name_of("associative_scan_remat", combine)
    if not callable(combine):
        raise WrongType(
            f"associative_scan_remat(combine, xs): combine comes first, got {described(combine)}."
        )
    rows, n = rows_of(name, xs, None)
    leaves, spec = flatten(xs)
    if len(rows) != len(leaves):
        raise WrongType(f"{name}: xs has a leaf that is None; all are tensors of shape [length, ...].")

    def pairs(left: Leaves, right: Leaves) -> Leaves:
        traced = torch.compiler.is_dynamo_compiling()
        before = [] if traced else [version(t) for t in (*left, *right)]
        made, found = flatten(combine(unflatten(left, spec), unflatten(right, spec)))
        if not traced and before != [version(t) for t in (*left, *right)]:
            raise RematError(
                f"{name}: combine wrote into one of its operands in place, which other prefixes read. Make a "
                "new tensor: write left * right, not left.mul_(right)."
            )
        if found != spec or [_kind(t) for t in made] != [_kind(t) for t in right]:
            got = [_kind(t) for t in made]
            raise WrongType(
                f"{name}: combine was given rows of {[_kind(t) for t in right]} and returned {got}; its "
                "result has the structure, shapes and dtypes of its operands."
            )
        return made

    if reverse:
        rows = [x.flip(0) for x in rows]
    made = _chunked(pairs, rows, n)
    return unflatten([x.flip(0) for x in made] if reverse else made, spec)


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _chunked(pairs: Callable[..., Leaves], rows: Leaves, n: int) -> Leaves:
    """The prefixes: the first element, whole chunks as the steps of a scan, and what is left."""
    if n < 2:
        return [x.clone() for x in rows]

    def step(carry: Leaves, chunk: Leaves) -> tuple[Leaves, Leaves]:
        made = _prefixes(pairs, carry, chunk)
        return [x[-1] for x in made], made

    def from_each(carry: Leaves, chunk: Leaves) -> Leaves:
        return _prefixes(pairs, carry, chunk)

    def at_once(carry: Leaves, chunks: Leaves) -> tuple[Leaves, Leaves]:
        totals = torch.vmap(lambda chunk: _total(pairs, chunk))(chunks)
        after = _prefixes(pairs, carry, totals)
        carries = [torch.cat([c.unsqueeze(0), x]) for c, x in zip(carry, after, strict=True)]
        return carries, torch.vmap(from_each)([c[:-1] for c in carries], chunks)

    if not torch.compiler.is_dynamo_compiling():
        step.at_once = at_once  # type: ignore[attr-defined]
    # A power of two has no odd element in any round.
    size = 1 << ((n - 1).bit_length() // 2)
    count = (n - 1) // size if n > 2 * size else 0
    sizes = [1, count * size, n - 1 - count * size]
    # One op takes them apart, whose derivative puts them together again.
    first, middle, rest = zip(*[x.split(sizes) for x in rows])  # noqa: B905
    last, parts = [x[0] for x in first], [[x] for x in first]
    if count:
        last, made = scan_remat(
            step, last, [x.unflatten(0, (count, size)) for x in middle], checkpoints="all"
        )
        parts = [[*part, y.flatten(0, 1)] for part, y in zip(parts, made)]  # noqa: B905
    if sizes[2]:
        _, made = with_policy(step, save_nothing)(last, list(rest))
        parts = [[*part, y] for part, y in zip(parts, made)]  # noqa: B905
    return [torch.cat(part) for part in parts]


def _halves(rows: Leaves) -> tuple[Leaves, Leaves]:
    """The first and the second of each two rows; a last one without a second is left out."""
    half = rows[0].shape[0] // 2
    even = [x if x.shape[0] == 2 * half else x[: 2 * half] for x in rows]
    both = [x.unflatten(0, (half, 2)).unbind(1) for x in even]
    return [left for left, _ in both], [right for _, right in both]


def _total(pairs: Callable[..., Leaves], rows: Leaves) -> Leaves:
    """All rows in one, of which there is a power of two."""
    while rows[0].shape[0] > 1:
        rows = pairs(*_halves(rows))
    return [x[0] for x in rows]


def _prefixes(pairs: Callable[..., Leaves], carry: Leaves, rows: Leaves) -> Leaves:
    """All prefixes behind `carry`, in logarithmic depth: every second one by pairs, the others from those."""
    n = rows[0].shape[0]
    first = [c.unsqueeze(0) for c in carry]
    if n == 1:
        return pairs(first, rows)
    left, right = _halves(rows)
    made = _prefixes(pairs, carry, pairs(left, right))
    del right
    even = pairs([torch.cat([c, p[:-1]]) for c, p in zip(first, made)], left)  # noqa: B905
    both = [torch.stack([e, p], 1).flatten(0, 1) for e, p in zip(even, made)]  # noqa: B905
    if n % 2 == 0:
        return both
    last = pairs([p[-1:] for p in made], [x[-1:] for x in rows])
    return [torch.cat(ends) for ends in zip(both, last)]  # noqa: B905
