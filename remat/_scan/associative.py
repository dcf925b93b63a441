"""`associative_scan_remat`: `jax.lax.associative_scan` for PyTorch, whose backward keeps few values."""

from __future__ import annotations

import functools
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
    linear recurrences are written in it. Between the passes one value is kept for each chunk of about
    4 sqrt(length), beside `xs`, and the backward works on one chunk at a time.
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
    """The prefixes: those of what does not fill a chunk, then chunks as the steps of a scan."""
    if n < 2:
        return [x.clone() for x in rows]
    # About 4 sqrt(n) elements, since with fewer the backward is bound by its number of ops; a number that
    # divides, so that nothing is copied to be joined, and of many halves.
    near = 1 << ((n - 1).bit_length() // 2 + 2)
    sizes = range(near // 2, near + 1, max(1, near // 16))
    size = max([d for d in sizes if n % d == 0], key=lambda d: d & -d, default=near)
    count = n // size if n > 2 * size else 0

    def step(carry: Leaves, x: Leaves) -> tuple[Leaves, Leaves]:
        behind, *chunk = x

        def after_carry(one: Leaves) -> Leaves:
            # Of the first chunk, which has nothing before it, a product that nobody reads or differentiates.
            right = [torch.where(behind, x, x.detach()) for x in one]
            return [torch.where(behind, y, x) for x, y in zip(one, pairs(carry, right))]  # noqa: B905

        made, last = _prefixes(pairs, chunk, after_carry)
        return last, made

    def at_once(carry: Leaves, xs: Leaves) -> tuple[Leaves, Leaves]:
        _, *chunks = xs
        rows = [x.flatten(0, 1) for x in chunks]
        made = _prefixes(pairs, rows, functools.partial(pairs, carry) if head else None)[0]
        after = [y[size - 1 :: size].unsqueeze(1) for y in made]
        carries = [torch.cat([c.unsqueeze(0), y]) for c, y in zip(carry, after)]  # noqa: B905
        return carries, [y.unflatten(0, (count, size)) for y in made]

    if not torch.compiler.is_dynamo_compiling():
        step.at_once = at_once  # type: ignore[attr-defined]
    parts: list[Leaves] = []
    head, start = n - count * size, [x[:1].detach() for x in rows]
    if head:
        # One op takes them apart, whose derivative puts them together again.
        given, rows = map(list, zip(*[x.split([head, n - head]) for x in rows]))  # noqa: B905
        made, start = with_policy(lambda *rows: _prefixes(pairs, [*rows]), save_nothing)(*given)
        parts.append(made)
    if count:
        behind = torch.arange(count, device=rows[0].device) >= (0 if head else 1)
        chunks = [x.unflatten(0, (count, size)) for x in rows]
        made = scan_remat(step, start, [behind, *chunks], checkpoints="all")[1]
        parts.append([y.flatten(0, 1) for y in made])
    return [torch.cat(part) for part in zip(*parts)] if len(parts) > 1 else parts[0]  # noqa: B905


def _prefixes(
    pairs: Callable[..., Leaves], rows: Leaves, first: Callable[[Leaves], Leaves] | None = None
) -> tuple[Leaves, Leaves]:
    """All prefixes of rows, and the last one, in logarithmic depth: every second one by pairs, the others
    from those. `first` makes of the first row what takes its place."""
    n = rows[0].shape[0]
    if n == 1:
        rows = rows if first is None else first(rows)
        return rows, rows
    even = rows if n % 2 == 0 else [x[: n - 1] for x in rows]
    left, right = zip(*[x.unflatten(0, (n // 2, 2)).unbind(1) for x in even])  # noqa: B905
    # Split, whose derivative is one op; that of a slice fills zeros first.
    one, others = zip(*[x.split([1, n // 2 - 1]) for x in left])  # noqa: B905
    if first is not None:
        one = first([*one])
        left = [torch.cat(ends) for ends in zip(one, others)]  # noqa: B905
    made, last = _prefixes(pairs, pairs(left, right))
    del left, right
    if n > 3:
        before = [p.split([n // 2 - 1, 1])[0] for p in made]
        one = [torch.cat(ends) for ends in zip(one, pairs(before, others))]  # noqa: B905
        del before
    both = [torch.stack([e, p], 1).flatten(0, 1) for e, p in zip(one, made)]  # noqa: B905
    if n % 2 == 0:
        return both, last
    last = pairs(last, [x[-1:] for x in rows])
    return [torch.cat(ends) for ends in zip(both, last)], last  # noqa: B905
