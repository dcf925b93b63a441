"""`tiled`: a function that acts token by token, run as a scan over tiles of its tokens."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from remat._core import described
from remat._dynamo import call_scan
from remat._inspect import looked_at
from remat._region import anchor, with_policy
from remat._scan.mixing import check_tokens
from remat._scan.scan import bytes_of, run_eager, structure
from remat.policies import save_nothing
from remat.schedules import All
from remat.transforms import (
    RematError,
    WrongType,
    WrongValue,
    beyond_regions,
    flatten,
    is_tensor,
    map_leaves,
    merge,
    named_like,
    unflatten,
)
from remat.transforms.closure import captured, reached, trial
from remat.transforms.compat import (
    hooks_aside,
    in_transform,
    is_fake,
    is_tracing,
    traced_as_it_runs,
    unwrapped,
)
from remat.transforms.region import is_recomputing
from remat.transforms.scan import ScanSpec, name_of, version

P = ParamSpec("P")
T = TypeVar("T")
Dims = int | tuple[int | None, ...]


def tiled(
    fn: Callable[P, T], *, dim: Dims = -2, tiles: int | None = None, peak: int | str | None = None
) -> Callable[P, T]:
    """`fn`, which acts token by token, on one tile of tokens at a time in the forward and in the backward.

    Between the passes nothing is kept but the operands. The backward runs a tile again and pulls back through
    it before it goes on to the next one, and adds up gradients of captured and shared tensors in place. A
    tile is a step of a scan without a carry: all that is said of `scan_remat` with "all" and no policy
    (transforms, random numbers, one op in compiled graphs) holds.

    Args:
        fn: a function or module. Its tensors of positional arguments (pytrees of them, too) are split along
            `dim`, keyword arguments and captured tensors are the same for all tiles. Its results, a pytree
            of tensors, have a row for each token and are joined along `dim`.
        dim: the dimension of the tokens, in arguments and results. A tuple has one for each positional
            argument, None where that is the same for all tiles; results are joined along the first.
        tiles: the number of tiles. Where it does not divide the tokens, tiles have
            ceil(tokens / tiles) of them, and the last one fewer; results and gradients of what is split are
            then copied once, to be joined.
        peak: bytes, such as "2GiB": the fewest tiles with which the result, the gradients and a tile of the
            backward fit. A call with operands of other shapes runs two small tiles to measure what a
            token takes. Without `tiles` and `peak` a tile of what is split first is about a square matrix:
            as many tokens, of all batches, as its last dimension has elements.

    Returns:
        A function of the same arguments and results.

    Raises:
        RematError: `fn` mixes tokens. The first call (of each mode, flags and division of arguments) compares
            a tile with a slice of the whole, and names the op. Results that have no row for each token.
        RematError: (also a `ValueError`) both `tiles` and `peak`, a peak that not even tiles of one token
            meet, a `dim` that an argument does not have, arguments with unlike numbers of tokens.
        RematError: (also a `TypeError`) positional arguments without a tensor, a `fn` that cannot be called.

    Example:
        >>> import torch
        >>> from remat import tiled
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        >>> x = torch.randn(2, 10, 4, requires_grad=True)
        >>> y = tiled(mlp, tiles=5)(x)
        >>> torch.allclose(y, mlp(x), atol=1e-6)
        True
        >>> y.sum().backward()  # two tokens at a time
    """
    if not callable(fn):
        raise WrongType(
            f"tiled(fn): the function comes first, got {described(fn)}. Write tiled(mlp, tiles=8)."
        )
    name = name_of("tiled", fn)
    if tiles is not None and peak is not None:
        raise WrongValue(f"{name}: got tiles={tiles!r} and peak={peak!r}; the number follows from a peak.")
    check_tiles(name, tiles)
    call = Tiled(fn, name, dim, tiles, peak)

    def in_tiles(*args: P.args, **kwargs: P.kwargs) -> T:
        return call(args, kwargs)

    return named_like(fn, in_tiles)


def check_tiles(name: str, tiles: Any) -> None:
    """A number of tiles as a user writes it."""
    if tiles is not None and (isinstance(tiles, bool) or not isinstance(tiles, int) or tiles < 1):
        raise WrongValue(f"{name}: got tiles={tiles!r}; a number of tiles is an int of at least 1.")


class Tiled:
    """What a tiled function is, and what its first call has told."""

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        dim: Dims,
        tiles: int | None,
        peak: Any = None,
        checked: bool = False,
    ) -> None:
        self.fn, self.name, self.dim, self.tiles = fn, name, dim, tiles
        self.peak = None if peak is None else bytes_of(f"{name}: peak", peak)
        self.joined = next((d for d in dim if d is not None), 0) if isinstance(dim, tuple) else dim
        # What first calls have told of a module holds for all its tiled functions: made in a `forward`, they
        # are new in each call.
        shared = isinstance(fn, torch.nn.Module) and not torch.compiler.is_compiling()
        self.known: dict[Any, Any] = _known.setdefault(fn, {}) if shared else {}
        self.checked = checked

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = flatten(args)
        at, dims = self._split(args, leaves)
        rows, fn = [leaves[i] for i in at], self.fn
        tokens = rows[0].shape[dims[0]]
        # What is split is no captured tensor of the body.
        shared = merge(leaves, at, [None] * len(at))

        def apply(rows: Sequence[torch.Tensor]) -> Any:
            return fn(*unflatten(merge(shared, at, rows), spec), **kwargs)

        def part(start: int, stop: int) -> list[torch.Tensor]:
            return [t.narrow(d, start, stop - start) for t, d in zip(rows, dims, strict=True)]

        if tokens == 0:
            return apply(rows)
        count = min(tokens, self._count(rows, dims, tokens, apply, part))
        if not self.checked and count > 1 and _comparable(rows):
            # Another mode, flag or division of the arguments is another function.
            modes = [m.training for m in fn.modules()] if isinstance(fn, torch.nn.Module) else []
            flags = [v for v in flatten((shared, kwargs))[0] if v is None or isinstance(v, bool | str)]
            key = spec, *at, *dims, *modes, *kwargs, *flags
            if not self.known.get(key):

                def probed(rows: list[torch.Tensor]) -> Any:
                    before = _versions(apply)
                    out = apply(rows)
                    if _versions(apply) != before:
                        _writers.add(anchor(fn))
                    return out

                look = functools.partial(check_tokens, self.name, probed, part, tokens, self._check)
                self.known[key] = _tried(look, apply, rows)
        size = -(-tokens // count)
        # Steps of a scan run again in its backward: one that writes would do so twice, and is a region.
        writes = not torch.compiler.is_compiling() and anchor(fn) in _writers
        whole = size if writes else tokens // size * size
        if whole == tokens:
            return self._run(apply, rows, dims, size)
        parts = zip(*[t.split(whole, d) for t, d in zip(rows, dims, strict=True)], strict=True)
        trees = [self._run(apply, list(part), dims, size) for part in parts]
        return map_leaves(lambda *c: c[0] if c[0] is None else torch.cat(c, self._joined(c[0])), *trees)

    def _split(self, args: tuple[Any, ...], leaves: list[Any]) -> tuple[list[int], list[int]]:
        """Which leaves of the arguments are split, and along which dimensions, counted from the end."""
        dims = self.dim if isinstance(self.dim, tuple) else (self.dim,) * len(args)
        if len(dims) != len(args):
            raise WrongValue(
                f"{self.name}: dim={self.dim!r} is for {len(dims)} positional arguments, got {len(args)}. "
                "Give each one a dimension, or None where all tiles read the same."
            )
        each = [d for arg, d in zip(args, dims, strict=True) for _ in flatten(arg)[0]]
        at = [i for i in range(len(leaves)) if is_tensor(leaves[i]) and each[i] is not None]
        if not at:
            raise WrongType(f"{self.name}: no positional argument has a tensor to split.")
        found = []
        for i in at:
            shape, d = tuple(leaves[i].shape), each[i]
            if not isinstance(d, int) or not -len(shape) <= d < len(shape):
                raise WrongValue(
                    f"{self.name}: dim={d!r} is no dimension of an argument of shape {shape}. Hand over by "
                    "keyword what all tiles read alike, or give each positional argument its own: "
                    "dim=(-2, -1), None for what is not split."
                )
            found.append(d if d < 0 else d - len(shape))
        sizes = [leaves[i].shape[d] for i, d in zip(at, found, strict=True)]
        for size in sizes:
            if size != sizes[0]:
                shapes = ", ".join([str(tuple(leaves[i].shape)) for i in at])
                raise WrongValue(
                    f"{self.name}: positional arguments of shapes {shapes} have {sizes} tokens along "
                    f"dim={self.dim!r}; all must have as many. Hand over by keyword what is not split, or "
                    "write dim=(..., None)."
                )
        return at, found

    def _count(self, rows: Any, dims: Any, tokens: int, apply: Any, part: Any) -> int:
        if self.tiles is not None:
            return self.tiles
        if self.peak is None:
            # A tile is then about as large as a weight: with fewer tokens products are slower.
            width = rows[0].shape[-1] if dims[0] != -1 else _TOKENS
            return max(1, rows[0].numel() // max(1, width * width))
        if torch.compiler.is_compiling() or in_transform():
            raise RematError(
                f"{self.name}: peak={self.peak:,} measures two tiles, which torch.compile and torch.func "
                "do not allow. Call it once outside of them, or write tiles=."
            )
        key = self.peak, *dims, *[(t.shape, t.dtype, t.requires_grad) for t in rows]
        if key not in self.known:
            from remat._scan.tile_bytes import tiles_within

            options = self.name, self.peak, tokens, apply, lambda count: part(0, count)
            with hooks_aside():
                own = captured(reached(apply))
                self.known[key] = _tried(lambda: tiles_within(*options, own), apply, rows)
        return self.known[key]

    def _joined(self, out: torch.Tensor) -> int:
        """The dimension along which results are joined, counted from the end."""
        return self.joined if self.joined < 0 else self.joined - out.dim()

    def _run(self, apply: Callable[..., Any], rows: list[torch.Tensor], dims: list[int], size: int) -> Any:
        """The results of tiles of `size` tokens, or of one that has fewer."""
        tokens = rows[0].shape[dims[0]]
        if tokens <= size:
            out = with_policy(lambda *rows: apply(rows), save_nothing)(*rows)
            self._check(out, tokens)
            return out

        def body(_: None, tile: list[torch.Tensor]) -> tuple[None, Any]:
            out = apply(tile)
            self._check(out, size)
            return None, out

        n, pairs = tokens // size, zip(rows, dims, strict=True)
        tiles = [t.unflatten(d, (n, size)).movedim(d - 1, 0) for t, d in pairs]
        if torch.compiler.is_dynamo_compiling():
            _, ys = call_scan(self.name, body, None, tiles, n, False, "all", False, None, joined=self.joined)
        else:
            spec = ScanSpec(self.name, n, structure(None), structure(tiles), All(), joined=self.joined)
            _, ys = run_eager(body, spec, None, tiles, body)
        return map_leaves(lambda y: y if y is None else self._whole(y), ys)

    def _whole(self, y: torch.Tensor) -> torch.Tensor:
        d = self._joined(y[0])
        return y.movedim(0, d - 1).flatten(d - 1, d)

    def _check(self, out: Any, size: int) -> None:
        """Raise if a result of `size` tokens has no row for each of them."""
        for y in flatten(out)[0]:
            if is_tensor(y):
                d = self._joined(y)
                if -y.dim() <= d < 0 and y.shape[d] == size:
                    continue
            elif y is None:
                continue
            got = f"shape {tuple(y.shape)}" if is_tensor(y) else type(y).__name__
            raise WrongValue(
                f"{self.name}: a result of a tile of {size} tokens is {got}, with no row for each token "
                f"along dim={self.dim!r}. Return what each token has, and add up outside; where results have "
                "other numbers of dimensions than arguments, count dim from the left."
            )


# Tokens of a tile of what has one number for each.
_TOKENS = 4096
# By module, of which calls it is known that it acts token by token, and tiles by peak and shapes.
_known: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
# Functions that a look has seen write to what they capture, also those that are made anew in each call.
_writers: weakref.WeakSet[Any] = weakref.WeakSet()


def _versions(fn: Callable[..., Any]) -> list[tuple[int, int]]:
    """By which it shows whether a function has written to what it captures, or put something in its place."""
    return [(id(t), version(t)) for t in reached(fn) if is_tensor(t)]


def _tried(look: Callable[[], Any], *roots: Any) -> Any:
    """What a look at a function tells, of which nothing stays: what it wrote, stored and drew is undone."""

    def alone() -> Any:
        with looked_at(*roots):
            return look()

    with trial():
        return beyond_regions(alone)


def _comparable(rows: Sequence[torch.Tensor]) -> bool:
    """Whether numbers can be compared: traces and plans have none. What runs again was compared before."""
    if torch.compiler.is_compiling() or is_tracing() or traced_as_it_runs() or is_recomputing():
        return False
    return not any([t.is_meta or is_fake(unwrapped(t)) for t in rows])
