"""Random numbers that a traced recomputation can draw again: from a seed that the graph keeps, not from a
generator.

A generator's state cannot be put back in a graph, and a kept mask costs as much as an activation. So a draw
becomes a function of a seed, eight bytes that the forward draws from the default generator. Ops that are
not in the table below have their results kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remat.transforms.compat import outside_batched_grads
from remat.transforms.context import scoped
from remat.transforms.errors import RematError, user_line

_aten = torch.ops.aten
_library = torch.library.Library("remat", "FRAGMENT")
for _kind in ("uniform", "normal"):
    _library.define(f"{_kind}(SymInt[] size, Tensor seed, ScalarType dtype) -> Tensor")


def _drawn(name: str) -> Callable[..., torch.Tensor]:
    make = getattr(torch, name)

    def kernel(size: list[int], seed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator(seed.device).manual_seed(int(seed))
        with outside_batched_grads():  # which let no op draw; the seed is one for all of them
            return make(size, generator=generator, dtype=dtype, device=seed.device)

    return kernel


def _shaped(size: list[int], seed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=seed.device)


for _kind, _make in (("uniform", "rand"), ("normal", "randn")):
    _library.impl(_kind, _drawn(_make), "CompositeExplicitAutograd")
    torch.library.register_fake(f"remat::{_kind}", _shaped, lib=_library)


def new_seed(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """A seed from the default generator of the device that the call draws on: int64, no dimensions."""
    with scoped(seeding=True):
        return torch.randint(0, 2**31 - 1, (), dtype=torch.int64, device=_device(args, kwargs))


def _device(args: Any, kwargs: Any) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device
    return torch.get_default_device()


def refuse_generator(region: str, func: Any, args: Any, kwargs: Any) -> None:
    """Raise for a call that draws from a generator of the user's, whose state no graph can put back."""
    if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
        raise RematError(
            f"region {region!r} draws with {func} from an explicit torch.Generator, at {user_line()}. "
            "In a compiled graph its state cannot be put back for the recomputation. Draw outside the region "
            "and pass the numbers in, or leave generator= out."
        )


def can_seed(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether `draw` knows this op."""
    if func in _INTEGERS:
        low, high = _bounds(func, args)
        return isinstance(low, int) and isinstance(high, int) and high - low <= 1 << 20
    return func in _DRAWS


def draw(seed: torch.Tensor, func: Any, args: Any, kwargs: Any) -> Any:
    """What `func(*args, **kwargs)` would draw, as a function of `seed`."""
    return _DRAWS[func](_Source(seed, func), *args, **kwargs)


class _Source:
    """Where a draw's numbers come from."""

    def __init__(self, seed: torch.Tensor, func: Any) -> None:
        self.seed, self.func = seed, func

    def uniform(self, size: Any, dtype: torch.dtype) -> torch.Tensor:
        return self._drawn(torch.ops.remat.uniform.default, size, dtype)

    def normal(self, size: Any, dtype: torch.dtype) -> torch.Tensor:
        drawn = self._drawn(torch.ops.remat.normal.default, size, dtype)
        # Of a complex number the whole has a variance of 1.
        return drawn * 0.5**0.5 if dtype.is_complex else drawn

    def _drawn(self, op: Any, size: Any, dtype: torch.dtype) -> torch.Tensor:
        if not dtype.is_complex:
            return op(list(size), self.seed, dtype)
        # Real and imaginary parts: Inductor draws no complex numbers.
        return torch.view_as_complex(op([*size, 2], self.seed, dtype.to_real()))

    def chance(self, like: torch.Tensor, p: Any) -> torch.Tensor:
        """True with probability `p`."""
        smooth = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        # Half precision has too few numbers between 0 and 1 for a probability.
        return self.uniform(like.shape, torch.promote_types(smooth, torch.float32)) < p


def _dropout(source: _Source, x: torch.Tensor, p: float, train: bool | None) -> Any:
    mask = source.chance(x, 1 - p)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return x * mask * scale, mask


def _dtype(given: torch.dtype | None, like: torch.Tensor | None = None) -> torch.dtype:
    return given or (torch.get_default_dtype() if like is None else like.dtype)


def _normal(source: _Source, mean: Any, std: Any = 1.0, **_: Any) -> torch.Tensor:
    shape = torch.broadcast_shapes(*[t.shape for t in (mean, std) if isinstance(t, torch.Tensor)])
    dtype = (mean if isinstance(mean, torch.Tensor) else std).dtype
    return source.normal(shape, dtype) * std + mean


def _bounds(func: Any, args: Any) -> tuple[Any, Any]:
    skip = 1 if func._schema.name.endswith("_like") else 0
    low = args[skip] if "low" in func._overloadname else 0
    return low, args[skip + (1 if "low" in func._overloadname else 0)]


def _randint(source: _Source, *args: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
    low, high = _bounds(source.func, args)
    like = args[0] if isinstance(args[0], torch.Tensor) else None
    size = args[-1] if like is None else like.shape
    wanted = dtype or (torch.int64 if like is None else like.dtype)
    whole = torch.floor(source.uniform(size, torch.float32) * (high - low)).to(torch.int64)
    return (whole.clamp(max=high - low - 1) + low).to(wanted)


_INTEGERS = {
    _aten.randint.default: _randint,
    _aten.randint.low: _randint,
    _aten.randint_like.default: _randint,
    _aten.randint_like.low_dtype: _randint,
}
# Of each the first argument is where the numbers come from.
_DRAWS: dict[Any, Callable[..., Any]] = {
    **_INTEGERS,
    _aten.native_dropout.default: _dropout,
    _aten.bernoulli.default: lambda s, x, **_: s.chance(x, x).to(x.dtype),
    _aten.bernoulli.p: lambda s, x, p, **_: s.chance(x, p).to(x.dtype),
    _aten.bernoulli_.float: lambda s, x, p=0.5, **_: x.copy_(s.chance(x, p)),
    _aten.bernoulli_.Tensor: lambda s, x, p, **_: x.copy_(s.chance(x, p)),
    _aten.rand.default: lambda s, size, dtype=None, **_: s.uniform(size, _dtype(dtype)),
    _aten.randn.default: lambda s, size, dtype=None, **_: s.normal(size, _dtype(dtype)),
    _aten.rand_like.default: lambda s, x, dtype=None, **_: s.uniform(x.shape, _dtype(dtype, x)),
    _aten.randn_like.default: lambda s, x, dtype=None, **_: s.normal(x.shape, _dtype(dtype, x)),
    _aten.uniform_.default: lambda s, x, low=0.0, high=1.0, **_: x.copy_(
        s.uniform(x.shape, x.dtype) * (high - low) + low
    ),
    _aten.normal_.default: lambda s, x, mean=0.0, std=1.0, **_: x.copy_(
        # (To torch the mean is that of both parts of a complex number.)
        s.normal(x.shape, x.dtype) * std + (mean * (1 + 1j) if x.dtype.is_complex else mean)
    ),
    _aten.normal.Tensor_float: _normal,
    _aten.normal.float_Tensor: _normal,
    _aten.normal.Tensor_Tensor: _normal,
    _aten.exponential_.default: lambda s, x, rate=1.0, **_: x.copy_(
        -torch.log1p(-s.uniform(x.shape, x.dtype)) / rate
    ),
}
