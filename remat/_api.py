"""`remat`: a function with the same results that recomputes instead of storing."""

# What users pass is checked, whatever its type was said to be.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Generator, Iterable
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, get_args, overload

import torch

from remat._dynamo import call_planned, call_region, looks_at_calls, wrap
from remat._inspect import told, wanted
from remat.policies import Policy, PolicyLike, PolicySelector, as_policy, bind, save_everything, save_nothing
from remat.transforms import RematError, register
from remat.transforms.entry import outermost, run, run_transparently
from remat.transforms.region import Region, choosing, memory_of

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
T = TypeVar("T")

DeterminismCheck = Literal["metadata", "exact", "none"]
_CHECKS: tuple[str, ...] = get_args(DeterminismCheck)


class ArgumentError(RematError, ValueError):
    """An argument of `remat` that it cannot accept."""


class FunctionError(RematError, TypeError):
    """Something that cannot be rematerialized because it cannot be called."""


class Rematerialized(Protocol[P, R_co]):
    """What `remat(fn)` is to a type checker: a function like `fn`, a method where that is one."""

    @property
    def __wrapped__(self) -> Callable[P, R_co]: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: Any = ..., /) -> Rematerialized[P, R_co]: ...

    @overload
    def __get__(
        self: Rematerialized[Concatenate[S, Q], T], instance: S, owner: Any = ..., /
    ) -> Callable[Q, T]: ...


class _Decorator(Protocol):
    def __call__(self, fn: Callable[P, R], /) -> Rematerialized[P, R]: ...


@overload
def remat(
    fn: Callable[P, R],
    *,
    policy: PolicyLike = ...,
    name: str | None = ...,
    static_argnums: int | Iterable[int] = ...,
    static_argnames: str | Iterable[str] = ...,
    preserve_rng_state: bool = ...,
    determinism_check: DeterminismCheck = ...,
) -> Rematerialized[P, R]: ...


@overload
def remat(
    fn: None = None,
    *,
    policy: PolicyLike = ...,
    name: str | None = ...,
    static_argnums: int | Iterable[int] = ...,
    static_argnames: str | Iterable[str] = ...,
    preserve_rng_state: bool = ...,
    determinism_check: DeterminismCheck = ...,
) -> _Decorator: ...


def remat(
    fn: Callable[..., Any] | None = None,
    *,
    policy: PolicyLike = save_nothing,
    name: str | None = None,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    preserve_rng_state: bool = True,
    determinism_check: DeterminismCheck = "metadata",
) -> Any:
    """A function that does what `fn` does and that, when differentiated, recomputes instead of storing.

    Composes with plain autograd and with every `torch.func` transform, in any nesting. Between forward and
    backward it keeps the inputs that the backward needs and the values that `policy` saves (of those, only
    what the backward reads); the rest is computed again.

    Args:
        fn: any callable: function, method, partial, `nn.Module`. Left out, `remat(...)` decorates.
        policy: what to save; a `Policy`, a callable from `OpInfo` to `Decision`, or a list of ops.
        name: what messages and reports call the region; by default the function's own name.
        static_argnums: positions of arguments that are handed through as they are (no pytrees, no tensors).
        static_argnames: names of such keyword arguments.
        preserve_rng_state: draw the same random numbers in the recomputation.
        determinism_check: "metadata" compares shape, dtype and device of what is recomputed; "exact" all
            results bitwise (for debugging: slow, names the first op that differs); "none" does not look.

    Returns:
        A function with `fn`'s signature, name and docstring; `fn` itself is its `__wrapped__`.

    Raises:
        RematError: (also a `TypeError` or `ValueError`) for arguments that cannot work; when called, if the
            region cannot be recomputed truly: written arguments, other ops in the replay, other shapes.

    Example:
        >>> import torch
        >>> from remat import remat, save_matmuls
        >>> @remat(policy=save_matmuls)
        ... def layer(w, x):
        ...     return torch.tanh(x @ w)
        >>> w, x = torch.eye(2), torch.ones(2)
        >>> torch.func.grad(lambda w: layer(w, x).sum())(w)
        tensor([[0.4200, 0.4200],
                [0.4200, 0.4200]])

    Which matmul outputs are kept here: `x @ w`, from which `tanh` is computed again. Source of the idea:
    `jax.checkpoint` (https://docs.jax.dev/en/latest/gradient-checkpointing.html) and Chen et al., 2016,
    "Training deep nets with sublinear memory cost" (https://arxiv.org/abs/1604.06174).
    """
    if determinism_check not in _CHECKS:
        raise ArgumentError(
            f"remat(determinism_check={determinism_check!r}): expected one of {', '.join(map(repr, _CHECKS))}"
        )
    options = _Options(
        as_policy(policy),
        name,
        _indices(static_argnums),
        _names(static_argnames),
        preserve_rng_state,
        determinism_check,
    )
    if torch.compiler.is_dynamo_compiling():
        return functools.partial(wrap, options=options) if fn is None else wrap(fn, options)
    if fn is None:
        return functools.partial(_wrap, options=options)
    return _wrap(fn, options)


class _Options:
    """The arguments of `remat`, checked."""

    def __init__(
        self,
        policy: Policy,
        name: str | None,
        numbers: tuple[int, ...],
        names: frozenset[str],
        random: bool,
        check: str,
    ) -> None:
        self.policy, self.name, self.numbers, self.names, self.random, self.check = (
            policy,
            name,
            numbers,
            names,
            random,
            check,
        )

    def label(self, fn: Callable[..., Any]) -> str:
        """What messages call the region."""
        return self.name or getattr(fn, "__qualname__", None) or type(fn).__name__

    def region(self, fn: Callable[..., Any], policy: Policy, label: str | None = None) -> Region:
        label = label or self.label(fn)
        selector = None if policy == save_nothing else functools.partial(PolicySelector, policy, label)
        key = policy.key if policy.repeatable else None
        return Region(fn, label, selector, self.random, self.check, memory_of(anchor(fn)), key)

    def eager(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` as a region, where Dynamo gave it up."""
        return _wrap(fn, self)

    def under(self, policy: Policy) -> _Options:
        """The same with another policy."""
        return _Options(policy, self.name, self.numbers, self.names, self.random, self.check)


class _Forced(threading.local):
    policy: Policy | None = None


_forced = _Forced()


@contextlib.contextmanager
def under_policy(policy: Policy) -> Generator[None]:
    """Let every region that this thread calls meanwhile have this policy, to compare it with its own."""
    before = _forced.policy
    _forced.policy = policy
    try:
        yield
    finally:
        _forced.policy = before


def _wrap(fn: Callable[..., Any], options: _Options) -> Callable[..., Any]:
    if not callable(fn):
        raise FunctionError(
            f"remat(fn): fn must be callable, got {fn!r} of type {type(fn).__name__}; write remat(function) "
            "or @remat"
        )
    _check_static_names(fn, options.names)
    region = options.region(fn, options.policy)
    static = bool(options.numbers or options.names)
    keeps_everything = options.policy == save_everything
    label, number = region.name, register(options)
    # Most policies are the same for every call; asking them takes longer than a small op.
    binds = looks_at_calls(options.policy)
    compile_call = call_planned if binds else call_region

    ordinary = not (keeps_everything or static or binds)

    def eager(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forced = _forced.policy
        if ordinary and forced is None:
            return run(region, args, kwargs)
        if forced is not None and options.policy is not forced:
            return _wrap(fn, options.under(forced))(*args, **kwargs)
        if keeps_everything and outermost():
            with choosing():
                return run_transparently(fn, args, kwargs)
        if static:
            return _call_static(fn, options, args, kwargs)
        bound = bind(options.policy, fn, args, kwargs) if binds else options.policy
        return run(region if bound is options.policy else options.region(fn, bound), args, kwargs)

    # Dynamo looks into every cell, so this one closes over strings and functions alone.
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return compile_call(label, number, fn, args, kwargs)
        if wanted():
            return told(label, functools.partial(eager, args, kwargs))
        return eager(args, kwargs)

    # Tracebacks name the region, those of torch.compile too; and what Dynamo keeps for a region's code, and
    # how often it compiles it, is then no other region's.
    rematerialized.__code__ = rematerialized.__code__.replace(co_name=f"region {label!r}")
    functools.update_wrapper(rematerialized, fn, updated=())
    if isinstance(fn, torch.nn.Module):
        rematerialized.__signature__ = inspect.signature(fn.forward)  # type: ignore[attr-defined]
        rematerialized.__name__ = rematerialized.__qualname__ = type(fn).__name__
    rematerialized.__wrapped__ = fn  # type: ignore[attr-defined]
    return rematerialized


def _check_static_names(fn: Callable[..., Any], names: frozenset[str]) -> None:
    """Raise for a static name that `fn` cannot be called with: it would silently do nothing."""
    if not names:
        # Reading a signature takes longer than the rest, and layers of models make a region in each call.
        return
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    if unknown := sorted(names - set(parameters)):
        label = getattr(fn, "__qualname__", type(fn).__name__)
        raise ArgumentError(
            f"remat(static_argnames={unknown[0]!r}): {label} takes no argument of that name; it takes "
            f"{', '.join(parameters) or 'none'}"
        )


def _call_static(
    fn: Callable[..., Any], options: _Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call with the static arguments taken out of the pytrees and put back inside."""
    count = len(args)
    for i in options.numbers:
        if not -count <= i < count:
            raise ArgumentError(
                f"remat(static_argnums={options.numbers}): {i} is no position among the {count} positional "
                f"arguments of this call of {getattr(fn, '__qualname__', fn)}; use numbers from {-count} to "
                f"{count - 1}, or static_argnames for keywords"
            )
    fixed = {i % count for i in options.numbers}
    moving = tuple([a for i, a in enumerate(args) if i not in fixed])
    settled = {k: v for k, v in kwargs.items() if k in options.names}
    for value in (*[args[i] for i in fixed], *settled.values()):
        if isinstance(value, torch.Tensor):
            raise ArgumentError(
                "remat: a static argument is a tensor; static arguments carry no derivative, pass it as an "
                "ordinary one"
            )
    call = _Static(fn, args, fixed, settled)
    bound = bind(options.policy, call, moving, {k: v for k, v in kwargs.items() if k not in settled})
    region = options.region(call, bound)
    return run(region, moving, {k: v for k, v in kwargs.items() if k not in settled})


class _Static:
    """`fn` with some arguments fixed."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], fixed: set[int], settled: dict[str, Any]
    ) -> None:
        self.fn, self.settled = fn, settled
        self.fixed = {i: args[i] for i in fixed}
        self.count = len(args)
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__name__)

    def made_of(self) -> tuple[Any, ...]:
        """What tells one of these, which are made anew at every call, from another."""
        return self.fn, self.fixed, self.count, self.settled

    def __call__(self, *moving: Any, **kwargs: Any) -> Any:
        rest = iter(moving)
        args = [self.fixed[i] if i in self.fixed else next(rest) for i in range(self.count)]
        return self.fn(*args, **self.settled, **kwargs)


def anchor(fn: Any) -> Any:
    """The object with whose life what was learnt about `fn` ends: a module, or a function's code."""
    if isinstance(fn, functools.partial):
        return anchor(fn.func)
    if isinstance(fn, types.MethodType):
        return fn.__self__ if isinstance(fn.__self__, torch.nn.Module) else anchor(fn.__func__)
    if isinstance(fn, types.FunctionType):
        return anchor(fn.__dict__["__wrapped__"]) if hasattr(fn, "__wrapped__") else fn.__code__
    if isinstance(fn, _Static):
        return anchor(fn.fn)
    return fn if isinstance(fn, torch.nn.Module) else cast(Any, type(fn))


def _indices(value: int | Iterable[int]) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    if bad := [n for n in numbers if not isinstance(n, int) or isinstance(n, bool)]:
        raise ArgumentError(f"remat(static_argnums=...): expected integers, got {bad[0]!r}")
    return numbers


def _names(value: str | Iterable[str]) -> frozenset[str]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if bad := [n for n in names if not isinstance(n, str)]:
        raise ArgumentError(f"remat(static_argnames=...): expected strings, got {bad[0]!r}")
    return frozenset(names)
