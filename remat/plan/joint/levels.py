"""A call under functorch levels, written as a call without: what its ops will be at the bottom."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from remat.plan.joint.graph import Joint, record
from remat.transforms import flatten, is_tensor, merge, smooth, tree_leaves, unflatten
from remat.transforms.closure import ClosureConversion, as_operand, captured, reached
from remat.transforms.compat import (
    GRAD,
    VMAP,
    below_levels,
    in_transform,
    is_tracing,
    is_wrapped,
    level_of,
    levels,
    outside_all_modes,
    unwrap_batched,
    unwrap_for_grad,
    unwrapped,
)


@dataclass(frozen=True)
class Peeled:
    """A call with its functorch wrappers taken off.

    Attributes:
        leaves: the flattened arguments at the bottom; differentiated ones require grad.
        steps: from the innermost level out, `("vmap", in_dims, randomness)` or `("grad", positions)`.
        direct: for each leaf whether it is an argument itself, not one inside a container.
        captured: the tensors that the last leaves stand for, which the function reads from elsewhere.
    """

    leaves: tuple[Any, ...]
    spec: Any
    steps: tuple[tuple[Any, ...], ...]
    direct: tuple[bool, ...]
    captured: tuple[torch.Tensor, ...] = ()


def captured_at_levels(fn: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    """What `fn` captures that belongs to a level, or in whose place a region around has put an operand."""
    found = captured(reached(fn))
    return tuple([t for t in found if is_wrapped(t) or as_operand(t) is not t])


def peel(args: tuple[Any, ...], kwargs: dict[str, Any], captured: tuple[torch.Tensor, ...] = ()) -> Peeled:
    """Take every functorch wrapper off the tensors of a call, and off those that its function captures."""
    leaves, spec = flatten((args, kwargs))
    leaves += [as_operand(t) for t in captured]
    steps: list[tuple[Any, ...]] = []
    tracked: set[int] = set()
    alone = {id(a) for a in (*args, *kwargs.values())}
    direct = tuple(id(leaf) in alone for leaf in leaves)
    for number, kind, randomness in reversed(levels()):
        inside = [k for k, t in enumerate(leaves) if is_tensor(t) and level_of(t) == number]
        if kind == VMAP:
            dims: list[int | None] = [None] * len(leaves)
            for k in inside:
                leaves[k], dims[k] = unwrap_batched(leaves[k], number)
            if any(d is not None for d in dims):
                steps.append(("vmap", tuple(dims), randomness))
            continue
        moving = tuple(k for k in inside if leaves[k].requires_grad)
        for k in inside:
            leaves[k] = unwrap_for_grad(leaves[k], number)
        if kind == GRAD and moving:
            tracked.update(moving)
            steps.append(("grad", moving))
    for k, leaf in enumerate(leaves):
        if is_tensor(leaf):
            leaf = unwrapped(leaf)
            leaves[k] = _stand_alone(leaf, (k in tracked and smooth(leaf)) or leaf.requires_grad)
    return Peeled(tuple(leaves), spec, tuple(steps), direct, captured)


def _stand_alone(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """An alias that belongs to no level; parameters stay themselves where they can."""
    held = isinstance(tensor, torch.nn.Parameter) or not in_transform()
    if tensor.requires_grad == requires_grad and held:
        return tensor
    # A tensor of a trace is nothing without the trace's mode (2.13 lets it be).
    with below_levels() if is_tracing() else outside_all_modes():
        # What was made in inference mode requires no gradient outside of it.
        alias = tensor.clone() if tensor.is_inference() else tensor.detach()
        return alias.requires_grad_(requires_grad)


def record_peeled(fn: Callable[..., Any], call: Peeled) -> Joint:
    """The joint graph of what the levels run at the bottom."""
    count = call.spec.num_leaves

    def at_example(*leaves: Any) -> Any:
        args, kwargs = unflatten(list(leaves[:count]), call.spec)
        table = {id(t): leaf for t, leaf in zip(call.captured, leaves[count:], strict=True)}
        with ClosureConversion(table, ()).lenient() if table else contextlib.nullcontext():
            out = fn(*args, **kwargs)
        # vmap takes nothing else.
        return [t for t in tree_leaves(out) if is_tensor(t)]

    steps = list(call.steps)
    body: Callable[..., Any] = at_example
    while steps and steps[0][0] == "vmap":
        body = _batched(body, steps.pop(0))
    elsewhere = range(count, len(call.leaves))
    # Positions of leaves as positions in what `_grouped` makes.
    order = sorted(range(len(call.direct)), key=lambda k: not call.direct[k])
    held = [order.index(k) for k in (*getattr(fn, "held", ()), *elsewhere)]
    if not any(kind == "vmap" for kind, *_ in steps):
        return record(_apart(body, call.direct), _grouped(call), held=held)
    # A vmap around a grad: torch.func differentiates inside it.
    moving = steps.pop(0)[1]

    def whole(switch: Callable[[], None], *given: Any) -> Any:
        run = _differentiated(body, moving, switch)
        for step in steps:
            run = _batched(run, step) if step[0] == "vmap" else run
        return _apart(run, call.direct)(*given)

    return record(whole, _grouped(call), functional=True, held=held)


def _differentiated(
    body: Callable[..., Any], moving: tuple[int, ...], switch: Callable[[], None]
) -> Callable[..., Any]:
    """`body` and its pull-back with respect to the operands at `moving`, with `switch` called in between."""

    def run(*leaves: Any) -> Any:
        def of(*moved: Any) -> Any:
            results = tree_leaves(body(*merge(leaves, moving, moved)))
            return [t for t in results if is_tensor(t) and t.is_floating_point()]

        pulled: Any = torch.func.vjp(of, *[leaves[k] for k in moving])
        switch()
        return pulled[0], pulled[1]([torch.ones_like(t) for t in pulled[0]])

    return run


def _grouped(call: Peeled) -> tuple[Any, ...]:
    """The leaves that were arguments themselves, then the others (held elsewhere) in one container."""
    pairs = list(zip(call.leaves, call.direct, strict=True))
    return (*[leaf for leaf, direct in pairs if direct], [leaf for leaf, direct in pairs if not direct])


def _apart(body: Callable[..., Any], direct: tuple[bool, ...]) -> Callable[..., Any]:
    """`body`, taking what `_grouped` made."""

    def run(*given: Any) -> Any:
        alone, inside = iter(given[:-1]), iter(given[-1])
        return body(*[next(alone) if d else next(inside) for d in direct])

    return run


def _batched(body: Callable[..., Any], step: tuple[Any, ...]) -> Callable[..., Any]:
    _, dims, randomness = step

    def run(*given: Any) -> Any:
        # torch takes apart what it is given: objects of the user's go past it.
        at = [k for k, value in enumerate(given) if is_tensor(value)]
        of = lambda *tensors: body(*merge(given, at, tensors))  # noqa: E731
        over = torch.func.vmap(of, in_dims=tuple([dims[k] for k in at]), randomness=randomness)
        return over(*[given[k] for k in at])

    return run
