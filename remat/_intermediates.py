"""Named intermediates, and their gradients, as results of a function."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from remat._dynamo import (
    capture as intermediates_capture,
    capture_grads as intermediates_capture_grads,
    differentiated,
    offset,
)
from remat.transforms import (
    RematError,
    WrongType,
    argument_positions,
    check_scalar,
    flatten,
    named_like,
    replace_arguments,
    unflatten,
)
from remat.transforms.intermediates import Perturbations, Values, opened


def capture(fn: Callable[..., Any], names: str | Iterable[str]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Return named intermediates beside the result of `fn`. It does what forward hooks are used for.

    Args:
        fn: any function or module, with or without regions in it.
        names: names that it gives by `checkpoint_name`.

    Returns:
        A function of the same arguments that returns `(result, values)`. `values` maps each name to what was
        named: a tensor or a pytree, or a list of them, in order, if the name was given several times.
        They are results like any other: differentiable, with the batch in front where `fn` named them inside
        a `torch.func.vmap`. Nothing more is kept for the backward; what is recomputed is not collected again.

    Raises:
        RematError: when called. `fn` gives no such name, or gives it inside a `scan_remat` (return it among
            the ys instead), or has been compiled (compile the capture instead).

    Example:
        >>> import torch
        >>> from remat import capture, checkpoint_name, remat
        >>> block = remat(lambda x: checkpoint_name(x * 2, "h").exp())
        >>> result, values = capture(block, "h")(torch.ones(2))
        >>> values
        {'h': tensor([2., 2.])}
    """
    wanted = _wanted(names)

    def captured(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if torch.compiler.is_dynamo_compiling():
            result, found, seen = intermediates_capture(fn, wanted, args, kwargs)
            return result, _by_name(wanted, found, seen)
        session = Values(frozenset(wanted))
        with opened(session):
            result = fn(*args, **kwargs)
        return result, _by_name(wanted, session.found, session.seen)

    return named_like(fn, captured)


def capture_grads(
    fn: Callable[..., Any], names: str | Iterable[str], argnums: int | tuple[int, ...] | None = None
) -> Callable[..., Any]:
    """Return gradients of named intermediates beside the value of a scalar function.

    Args:
        fn: a function or module that returns a tensor of shape `()`.
        names: names that it gives by `checkpoint_name`.
        argnums: positional arguments (pytrees of tensors) whose gradients the same backward is to give.

    Returns:
        A function of the same arguments that returns `(value, gradients)`, or with `argnums`
        `(value, gradients of the arguments, gradients)`. `gradients` is shaped as the values of `capture`; it
        holds None for integer tensors, and zeros for what the result does not depend on.

        As with `remat.transforms.grad`, value and gradients can be differentiated in turn where a tensor
        takes part that requires grad, and their graph is then kept: under `torch.no_grad()` nothing is.

    Raises:
        RematError: when called, if `fn` gives no such name, gives it inside a `scan_remat`, or has been
            compiled.
        RuntimeError: when called, if `fn` returns no scalar.

    Gradients are those of an offset that is added to each named tensor: a negative zero, which changes no
    bit. Under `torch.func` a region's function runs once more, without gradients, for the offsets' shapes;
    `is_recomputing()` is true there.

    Example:
        >>> import torch
        >>> from remat import capture_grads, checkpoint_name, remat
        >>> loss = remat(lambda x: checkpoint_name(x * 2, "h").exp().sum())
        >>> capture_grads(loss, "h", argnums=0)(torch.zeros(2))
        (tensor(2.), tensor([2., 2.]), {'h': tensor([1., 1.])})
    """
    wanted = _wanted(names)

    def captured(*args: Any, **kwargs: Any) -> Any:
        positions = () if argnums is None else argument_positions(argnums, len(args))
        if torch.compiler.is_dynamo_compiling():
            value, grads, found, seen = intermediates_capture_grads(fn, wanted, positions, args, kwargs)
            named = _by_name(wanted, found, seen)
            return (value, named) if argnums is None else (value, grads, named)
        chosen = args[positions] if isinstance(positions, int) else tuple(args[i] for i in positions)
        flat, spec = flatten(chosen)

        def run(leaves: list[Tensor]) -> tuple[Tensor, Perturbations, list[Tensor]]:
            session = Perturbations(frozenset(wanted), functools.partial(offset, leaves[0]))
            with opened(session):
                moved = unflatten(leaves[1:], spec)
                value = fn(*replace_arguments(args, positions, moved), **kwargs)
            check_scalar(value)
            return value, session, []

        value, grads, session, found, _ = differentiated(run, flat)
        named = _by_name(wanted, found, session.seen)
        return (value, named) if argnums is None else (value, unflatten(grads, spec), named)

    return named_like(fn, captured)


def _wanted(names: str | Iterable[str]) -> tuple[str, ...]:
    wanted = (names,) if isinstance(names, str) else tuple(names)
    for name in wanted:
        if not isinstance(name, str):
            raise WrongType(f"capture(fn, names): names must be strings, got {name!r}")
    return tuple(sorted(set(wanted)))


def _by_name(wanted: tuple[str, ...], found: list[tuple[str, Any]], seen: Iterable[str]) -> dict[str, Any]:
    values: dict[str, list[Any]] = {name: [] for name in wanted}
    for name, tree in found:
        values[name].append(tree)
    for name, trees in values.items():
        if not trees:
            raise RematError(_unknown(name, tuple(seen)))
    return {name: trees[0] if len(trees) == 1 else trees for name, trees in values.items()}


def _unknown(name: str, seen: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, seen, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    none = (
        "It gave none at all (if torch.compile made it, its names cannot be looked at from outside: compile "
        "the capture instead, torch.compile(capture(fn, names)))"
    )
    gave = f"It gave {', '.join(map(repr, sorted(seen)))}{hint}" if seen else none
    write = f"x = checkpoint_name(x, {name!r})"
    return f"capture: the function gave nothing the name {name!r}. {gave}. Write {write}."


_unknown._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo calls it
