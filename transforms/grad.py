"""`grad` and `value_and_grad` under JAX's names, without a graph kept at the outermost level.

`torch.func.grad` runs its backward with `create_graph=True` because it cannot know whether another transform
will differentiate the result. At the outermost level that can be known, and plain autograd then frees every
saved tensor as the backward passes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from remat.transforms.compat import forward_ad_active, in_transform
from remat.transforms.errors import WrongValue
from remat.transforms.objects import is_tensor
from remat.transforms.pytree import flatten, map_only, tree_leaves, unflatten

P = ParamSpec("P")


def grad(
    fun: Callable[P, Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[P, Any]:
    """The gradient of a scalar function.

    Args:
        fun: returns a tensor of shape `()`; with `has_aux` a pair of it and any pytree.
        argnums: which positional arguments, pytrees of floating point or complex tensors, to differentiate.
        has_aux: `fun` returns `(value, aux)`.

    Returns:
        A function of the same arguments that returns the gradients, or `(gradients, aux)` with `has_aux`.
        They have the structure of the argument; for a tuple `argnums` they are a tuple.

    Raises:
        RuntimeError: `fun` returns no scalar tensor, or `argnums` is out of range.
        RematError: (also a `ValueError`) an argument to differentiate holds something other than tensors.

    The semantics are those of `torch.func.grad`. The graph of the gradients is kept in three cases, so that
    they can be differentiated in turn. These are inside another transform, under `torch.compile`, and in
    grad mode if a tensor takes part that requires grad. To keep nothing, pass detached parameters, or call
    it under `torch.no_grad()`.

    Example:
        >>> import torch
        >>> from remat.transforms import grad
        >>> grad(lambda x: x.sin().sum())(torch.zeros(2))
        tensor([1., 1.])
    """
    value_and_grad_fun = value_and_grad(fun, argnums, has_aux)

    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
        value, grads = value_and_grad_fun(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return named_like(fun, wrapper)


def value_and_grad(
    fun: Callable[P, Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[P, tuple[Any, Any]]:
    """The value and the gradient of a scalar function, value first.

    Args, raises: as `grad`.

    Returns:
        A function of the same arguments that returns `(value, gradients)`, or `((value, aux), gradients)`.

    Example:
        >>> import torch
        >>> from remat.transforms import value_and_grad
        >>> value_and_grad(lambda x: (x * x).sum())(torch.ones(3))
        (tensor(3.), tensor([2., 2., 2.]))
    """

    def wrapper(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, Any]:
        if torch.compiler.is_compiling() or _differentiated_around(args, kwargs):
            grads, value = torch.func.grad_and_value(fun, argnums, has_aux)(*args, **kwargs)
            return value, grads
        return _outermost(fun, argnums, has_aux, args, kwargs)

    return named_like(fun, wrapper)


def named_like(fun: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """`wrapper` with the name and docstring of `fun`, where nothing is being compiled."""
    # Dynamo cannot trace functools.wraps over everything that is callable, and needs no names.
    return wrapper if torch.compiler.is_compiling() else functools.wraps(fun, updated=())(wrapper)


def _differentiated_around(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether something outside may differentiate the result with respect to an argument."""
    # Autograd records nothing in inference mode, and nothing can require grad of its tensors outside it.
    if in_transform() or torch.is_inference_mode_enabled():
        return True
    tensors = [t for t in tree_leaves((args, kwargs)) if is_tensor(t)]
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return recorded or any(t.is_inference() for t in tensors) or forward_ad_active(tensors)


def _outermost(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...],
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any]:
    positions = argument_positions(argnums, len(args))
    chosen = args[positions] if isinstance(positions, int) else tuple(args[i] for i in positions)
    flat, spec = flatten(chosen)
    outer_grad = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [fresh_leaf(x) for x in flat]
        output = fun(*replace_arguments(args, positions, unflatten(leaves, spec)), **kwargs)
        value, aux = _split(output) if has_aux else (output, None)
        check_scalar(value)
        returned = [t for t in tree_leaves((value, aux)) if is_tensor(t)]
        # Captured tensors that require grad are found only now: derivatives with respect to them must flow
        # through what is returned, as with torch.func.grad.
        attached = outer_grad and reaches_other_leaves(returned, leaves)
        grads = gradients_of(value, leaves, create_graph=attached)
    result = (value, aux) if has_aux else value
    if not attached:
        result = map_only(Tensor, functools.partial(_detached, leaves, flat), result)
    return result, unflatten(grads, spec)


def argument_positions(argnums: Any, count: int) -> int | tuple[int, ...]:
    """`argnums` counted from the first of `count` arguments. Raises RuntimeError for none, or one twice."""
    if isinstance(argnums, tuple):
        positions = tuple(_position(i, count) for i in argnums)
        if not positions or len(set(positions)) < len(positions):
            raise RuntimeError(f"argnums must be unique and not empty, got {argnums}.")
        return positions
    return _position(argnums, count)


def _position(argnum: Any, count: int) -> int:
    if not isinstance(argnum, int):
        raise RuntimeError(f"argnums must be an int or a tuple of ints, got {argnum!r}, a {type(argnum)}.")
    if not -count <= argnum < count:
        raise RuntimeError(
            f"Got argnums={argnum}, but the function was called with {count} positional arguments. Keyword "
            f"arguments cannot be differentiated."
        )
    return argnum % count


def replace_arguments(args: tuple[Any, ...], positions: int | tuple[int, ...], new: Any) -> list[Any]:
    """The arguments with `new` at the position, or its parts at the positions."""
    replaced = list(args)
    chosen = [(positions, new)] if isinstance(positions, int) else zip(positions, new, strict=True)
    for i, value in chosen:
        replaced[i] = value
    return replaced


def fresh_leaf(x: Any) -> Tensor:
    """A leaf with the values of a tensor."""
    return checked_tensor(x).detach().requires_grad_()


def checked_tensor(x: Any) -> Tensor:
    """`x` itself. Raises ValueError where it is not a tensor."""
    if not is_tensor(x):
        raise WrongValue(
            f"An argument to differentiate must be a pytree of tensors, got {x!r} of type {type(x)} in it. "
            f"Pass it as another argument, or choose the arguments to differentiate with argnums."
        )
    return x


def _split(output: Any) -> tuple[Any, Any]:
    if not (isinstance(output, tuple) and len(output) == 2):
        raise RuntimeError(f"With has_aux=True the function must return (value, aux), got {type(output)}.")
    return output


def check_scalar(value: Any) -> None:
    """Raises RuntimeError where `value` is not a tensor of no dimensions."""
    if not is_tensor(value):
        raise RuntimeError(
            f"Expected the function to return a scalar tensor, got {value!r}, a {type(value)}."
        )
    if value.dim() != 0:
        raise RuntimeError(
            f"Expected the function to return a scalar tensor, got one of shape {tuple(value.shape)}. For "
            f"functions of many outputs use torch.func.vjp or torch.func.jacrev."
        )


def gradients_of(value: Tensor, leaves: list[Tensor], create_graph: bool) -> list[Tensor]:
    """Gradients of a scalar by the leaves, zeros by those that it does not depend on."""
    found: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if value.requires_grad:
        found = torch.autograd.grad(value, leaves, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def leaves_behind(roots: list[Tensor]) -> list[Tensor]:
    """The tensors in which the graph behind `roots` ends, wherever the function found them."""
    stack: list[Any] = [t.grad_fn for t in roots if t.grad_fn is not None]
    seen, found = set(stack), []
    while stack:
        node = stack.pop()
        # Only the node of a leaf holds a variable to accumulate into.
        if node.name().endswith("AccumulateGrad"):
            found.append(node.variable)
        new = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= new
        stack.extend(new)
    return found


def reaches_other_leaves(roots: list[Tensor], leaves: list[Tensor]) -> bool:
    """Whether the graph of `roots` ends in a tensor that requires grad and is none of `leaves`."""
    own = set(map(id, leaves))
    ends = [*(t for t in roots if t.is_leaf and t.requires_grad), *leaves_behind(roots)]
    return any(id(t) not in own for t in ends)


def _detached(leaves: list[Tensor], originals: list[Tensor], tensor: Tensor) -> Tensor:
    for leaf, original in zip(leaves, originals, strict=True):
        if tensor is leaf:
            return original
    # A tensor in which no gradient was recorded is returned itself, as torch.func does.
    return tensor.detach() if tensor.requires_grad else tensor
