"""The rules of the primitive that make no node: what `call` does at a level of vmap or jvp.

Each takes one level off and calls a primitive derived from the one at hand below it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from remat.transforms.compat import (
    JVP,
    VMAP,
    add_batch_dim,
    dual_level_known,
    dual_level_known_if_any,
    hooks_aside,
    interpreter,
    is_batched,
    is_dead,
    is_wrapped,
    level_of,
    restore_vmap,
    tangent_of,
    unwrap_batched,
    unwrap_for_grad,
    unwrap_once,
    wrap_for_grad,
)
from remat.transforms.errors import RematError, carried
from remat.transforms.functorch.primitive import (
    Body,
    Family,
    Prim,
    PullBack,
    Tensors,
    call,
    merged,
    reassemble,
    rule,
    writable,
)
from remat.transforms.ops import version_of, with_memory


@rule(VMAP)
def vmap_rule(level: Any, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """The rule of a level of `vmap`: the primitive of the vmapped function."""
    number = level.level()
    pairs = [unwrap_batched(t, number) for t in operands]
    in_dims = tuple([dim for _, dim in pairs])
    lowered = [t for t, _ in pairs]
    randomness = level.randomness()
    if randomness != "different" and all(dim is None for dim in in_dims):
        with level.lower():
            return call(prim, lowered)
    out_dims: list[Any] = []
    size = level.batch_size()
    for slot in prim.residual_slots:
        slot.apart.add(number)
    # Each example may have drawn numbers of its own, which operands without a batch do not show.
    drawn = randomness == "different" and prim.source is not None and number in prim.source.apart

    def batched(body: Body) -> Body:
        pull = body.batched(in_dims, size, randomness) if isinstance(body, PullBack) and not drawn else None
        if pull is not None:
            out_dims[:] = [0] * len(pull.mask)
            return pull
        over = restore_vmap(lambda *ts: tuple(body(*ts)), in_dims, size, randomness)

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs, dims = over(*tensors)
            out_dims[:] = dims
            return tuple(outs)

        return run

    with level.lower():
        outs = call(_mapped(prim, batched), lowered)
    return tuple(
        [t if d is None else add_batch_dim(t, d, number) for t, d in zip(outs, out_dims, strict=True)]
    )


def plain_duals(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Under a plain `forward_ad.dual_level`, below all functorch levels."""
    duals = [forward_ad.unpack_dual(t) for t in operands]
    return _with_their(*_on_duals(prim, duals))


def _dual_rule(level: Any, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    number = level.level()
    duals = [forward_ad.unpack_dual(t) if level_of(t) == number else (t, None) for t in operands]
    duals = [
        (unwrap_for_grad(p, number), None if t is None else unwrap_for_grad(t, number)) for p, t in duals
    ]
    with level.lower():
        made, tangents = _on_duals(prim, duals)
    wrapped = {i: wrap_for_grad(t, number) for i, t in tangents.items()}
    return _with_their([wrap_for_grad(t, number) for t in made], wrapped)


def _on_duals(prim: Prim, duals: Any) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Results, and by their places the tangents of those that have one."""
    primals = [p for p, _ in duals]
    at = [i for i, (_, t) in enumerate(duals) if t is not None]
    if not at:
        return list(call(prim, primals)), {}
    split: list[list[int]] = []
    dual = _mapped(prim, lambda body: _with_tangents(body, len(primals), at, split, prim.family))
    outs = call(replace(dual, dual=True), [*primals, *[duals[i][1] for i in at]])
    plain = len(outs) - len(split[0])
    return list(outs[:plain]), dict(zip(split[0], outs[plain:], strict=True))


def _with_their(made: list[torch.Tensor], tangents: dict[int, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    for i, tangent in tangents.items():
        made[i] = forward_ad.make_dual(with_memory(made[i]), tangent)
    return tuple(made)


def _with_tangents(body: Body, count: int, at: list[int], split: list[list[int]], family: Family) -> Body:
    """(primals, tangents of those at `at`) -> (outs, tangents of those outs that have one).

    Torch leaves out tangents known to be zero, by rules that differ between the passes: `split` has those of
    the first run. What has none is given none: ops that take no tangents may follow (`out=`, sparse ones).
    """

    def dual(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        primals, tangents = tensors[:count], tensors[count:]

        def of(*moving: torch.Tensor) -> Any:
            before = [version_of(t) for t in moving]
            with writable(primals, at, family) as others:
                outs = body(*merged(others, at, moving))
            if [version_of(t) for t in moving] != before:
                raise RematError(carried(family.region.name))
            if not split:
                split.append([i for i, t in enumerate(outs) if _moves(t)])
            rest = [t for i, t in enumerate(outs) if i not in split[0]]
            return tuple([outs[i] for i in split[0]]) or moving[:1], tuple(rest)

        with hooks_aside(), dual_level_known_if_any():
            # torch's stub gives the result two possible lengths.
            made: Any = torch.func.jvp(of, tuple(primals[i] for i in at), tuple(tangents), has_aux=True)
        smooth, out_tangents, rest = made
        some = len(split[0])
        return (*reassemble(smooth[:some], rest, split[0]), *out_tangents[:some])

    return dual


def _moves(tensor: torch.Tensor) -> bool:
    """Whether a result has a tangent at the innermost level."""
    level = interpreter()
    return level is not None and level_of(tensor) == level.level() and tangent_of(tensor) is not None


def _mapped(prim: Prim, transform: Callable[[Body], Body]) -> Prim:
    recorded = transform(prim.recorded) if prim.recorded is not None else None
    return replace(prim, body=transform(prim.body), recorded=recorded, mapped=True)


@rule(JVP)
def jvp_rule(level: Any, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """The rule of a level of `jvp`: the function runs on dual numbers."""
    with dual_level_known():
        return _dual_rule(level, prim, operands)


def rewrapped(tensor: torch.Tensor, bottom: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Another tensor with the same wrappers, and without tangents; `bottom` makes the one in them."""
    if not is_wrapped(tensor):
        return bottom(tensor)
    if is_dead(tensor):
        return rewrapped(unwrap_once(tensor), bottom)
    level = level_of(tensor)
    if is_batched(tensor):
        inner, dim = unwrap_batched(tensor, level)
        return add_batch_dim(rewrapped(inner, bottom), dim, level)
    return wrap_for_grad(rewrapped(unwrap_once(tensor), bottom), level)
