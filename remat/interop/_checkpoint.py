"""Calls shaped like `torch.utils.checkpoint.checkpoint` and `checkpoint_sequential`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar, cast, get_args, overload

import torch
from torch.utils.checkpoint import noop_context_fn

from remat._api import remat
from remat._core import described
from remat._region import Check as RegionCheck
from remat.interop._torch_policy import ContextPolicy, policy_function
from remat.policies import PolicyLike, save_nothing
from remat.transforms import RematError, WrongType
from remat.transforms.region import is_recomputing, run_again_whole

P = ParamSpec("P")
R = TypeVar("R")
Check = Literal["default", "metadata", "exact", "none"]
_CHECKS: dict[str, RegionCheck] = {"default": "metadata", **{c: c for c in get_args(RegionCheck)}}


class OptionError(RematError, ValueError):
    """An option of torch.utils.checkpoint with a value that nobody knows."""


@overload
def checkpoint(
    function: Callable[..., R],
    *args: Any,
    use_reentrant: bool | None = ...,
    context_fn: Callable[[], tuple[Any, Any]] = ...,
    preserve_rng_state: bool = ...,
    determinism_check: Check = ...,
    debug: bool = ...,
    early_stop: bool = ...,
    policy: PolicyLike | None = ...,
    **kwargs: Any,
) -> R: ...


@overload
def checkpoint(
    function: None = None,
    *,
    use_reentrant: bool | None = ...,
    context_fn: Callable[[], tuple[Any, Any]] = ...,
    preserve_rng_state: bool = ...,
    determinism_check: Check = ...,
    debug: bool = ...,
    early_stop: bool = ...,
    policy: PolicyLike | None = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = False,
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    preserve_rng_state: bool = True,
    determinism_check: Check = "default",
    debug: bool = False,
    early_stop: bool = True,
    policy: PolicyLike | None = None,
    **kwargs: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint`, also under `torch.func` and for second derivatives.

    Args:
        function: what to run; left out, this is a decorator with the other options (torch 2.14 on).
        args, kwargs: its arguments.
        use_reentrant: accepted; what runs is never reentrant, and needs none of reentrant autograd's care.
        context_fn: from `create_selective_checkpoint_contexts`: its policy is used, compiled too. Any other
            pair, in eager: the first context is around the forward, the second around the recomputation.
        preserve_rng_state: as in torch, under `torch.func` too.
        determinism_check: "default" (shape, dtype, device), "none", or this library's "exact".
        debug: accepted; errors always name the op and the line.
        early_stop: accepted; unused ops are never recomputed.
        policy: a policy of this library, instead of `context_fn`.

    Returns:
        What `function(*args, **kwargs)` returns.

    Raises:
        RematError: options that cannot be, such as both `context_fn` and `policy` (also a ValueError).

    Example:
        >>> import torch
        >>> from remat.interop import checkpoint
        >>> x = torch.zeros(2, requires_grad=True)
        >>> checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
        >>> x.grad
        tensor([1., 1.])
    """
    del use_reentrant, debug, early_stop
    if function is not None and not callable(function):
        raise WrongType(
            f"checkpoint(function, *args): the function comes first, got {described(function)}. Write "
            "checkpoint(fn, x): the function and its arguments apart."
        )
    if determinism_check not in _CHECKS:
        raise OptionError(
            f"checkpoint(determinism_check={determinism_check!r}): expected 'default', 'none' or 'exact'."
        )
    if policy is not None and context_fn is not noop_context_fn:
        raise OptionError("checkpoint got both context_fn and policy: say what to save in one of them.")
    options = {"preserve_rng_state": preserve_rng_state, "determinism_check": _CHECKS[determinism_check]}
    if function is None:
        return functools.partial(_decorate, context_fn=context_fn, policy=policy, options=options)
    return _region(function, context_fn, policy, options)(*args, **kwargs)


def _decorate(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return _region(function, **settings)(*args, **kwargs)

    return checkpointed


def _region(
    function: Callable[..., Any], context_fn: Callable[[], Any], policy: Any, options: dict[str, Any]
) -> Callable[..., Any]:
    if context_fn is noop_context_fn:
        return remat(function, policy=policy, **options)
    if torch.compiler.is_dynamo_compiling():
        # Dynamo runs no contexts of torch's: what they select is looked up when the graph is traced.
        return remat(function, policy=ContextPolicy(context_fn), **options)
    contexts: Any = context_fn()
    if policy_function(contexts) is not None:
        return remat(function, policy=ContextPolicy(context_fn), **options)
    if type(contexts) is not tuple or len(cast("tuple[Any, ...]", contexts)) != 2:
        raise OptionError(f"checkpoint(context_fn=...): expected two context managers, got {contexts!r}.")
    return remat(_within(function, cast("tuple[Any, Any]", contexts)), **options)


def _within(function: Callable[..., Any], contexts: tuple[Any, Any]) -> Callable[..., Any]:
    """`function` in the first context, and in the second when it runs again."""

    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        run_again_whole("its recomputation has a context of its own")
        with contexts[is_recomputing()]:
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True)
class CheckpointFunction:
    """A function `f(fn, *args, **kwargs)` that runs `fn` as a region: the hook of model libraries.

    Attributes:
        policy: what every region keeps.
        options: other arguments of `remat.remat`.

    Example:
        >>> import torch
        >>> from remat import save_matmuls
        >>> from remat.interop import CheckpointFunction
        >>> run = CheckpointFunction(save_matmuls)
        >>> run(torch.tanh, torch.zeros(2), use_reentrant=False)
        tensor([0., 0.])
    """

    policy: PolicyLike | None = save_nothing
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # They may say how torch's checkpoint would have to be called.
        for name in ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop"):
            kwargs.pop(name, None)
        return remat(function, policy=self.policy, **self.options)(*args, **kwargs)


def checkpoint_sequential(
    functions: torch.nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = False,
    *,
    preserve_rng_state: bool = True,
    policy: PolicyLike | None = save_nothing,
) -> Any:
    """Run `functions` one after the other, in `segments` parts of which all but the last are regions.

    Args:
        functions: a `torch.nn.Sequential`, or a list of functions from one value to the next.
        segments: from 1 to the number of functions.
        input: the first value, any pytree.
        use_reentrant: accepted, see `checkpoint`.
        preserve_rng_state: as in `remat.remat`.
        policy: what the regions keep.

    Raises:
        RematError: `segments` out of range (also a ValueError).

    Example:
        >>> import torch
        >>> from remat.interop import checkpoint_sequential
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        >>> checkpoint_sequential(model, 2, torch.zeros(3, 2)).shape
        torch.Size([3, 1])
    """
    del use_reentrant
    modules = list(functions.children()) if isinstance(functions, torch.nn.Sequential) else list(functions)
    if not 1 <= segments <= len(modules):
        raise OptionError(
            f"checkpoint_sequential(segments={segments}): there are {len(modules)} functions; write a number "
            f"from 1 to {len(modules)}."
        )
    size = len(modules) // segments
    for start in range(0, size * (segments - 1), size):
        chunk = _chain(modules[start : start + size])
        input = remat(chunk, policy=policy, preserve_rng_state=preserve_rng_state)(input)
    return _chain(modules[size * (segments - 1) :])(input)


def _chain(functions: list[Callable[..., Any]]) -> Callable[..., Any]:
    if len(functions) == 1:
        return functions[0]

    def chained(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return chained
