"""`remat`, a function with the same results that recomputes instead of storing, and `checkpoint_policy`."""

# What users pass is checked, whatever its type was said to be.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    overload,
)

from remat._core import Decision, OpInfo, described, to_install
from remat._region import Check, Inputs, Options, rematerialized
from remat.policies import (
    FromCallable,
    Policy,
    PolicyError,
    PolicyLike,
    RuleOfModules,
    as_policy,
    makes_policies,
    policy_given,
    save_names,
    save_nothing,
)
from remat.transforms import RematError, WrongValue

if TYPE_CHECKING:
    from torch.nn import Module

    from remat.plan import BudgetPolicy, CostModel

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
T = TypeVar("T")
M = TypeVar("M", bound="Module")

_CHECKS: tuple[str, ...] = get_args(Check)


class Rematerialized(Protocol[P, R_co]):
    """What `remat` returns: a function of `fn`'s signature that knows `fn`; a method where that is one."""

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
    @overload
    def __call__(self, fn: M, /) -> M: ...

    @overload
    def __call__(self, fn: Callable[P, R], /) -> Rematerialized[P, R]: ...


class _Options(TypedDict, total=False):
    """The options of `remat`, for its overloads."""

    policy: PolicyLike | None
    name: str | None
    static_argnums: int | Iterable[int]
    static_argnames: str | Iterable[str]
    preserve_rng_state: bool
    determinism_check: Check
    keep_decisions: bool
    inputs: Inputs


OPTIONS = tuple(_Options.__annotations__)


@overload
def remat(fn: M, **options: Unpack[_Options]) -> M: ...


@overload
def remat(fn: Callable[P, R], **options: Unpack[_Options]) -> Rematerialized[P, R]: ...


@overload
def remat(fn: None = None, **options: Unpack[_Options]) -> _Decorator: ...


def remat(
    fn: Callable[..., Any] | None = None,
    *args: Any,
    policy: PolicyLike | None = save_nothing,
    name: str | None = None,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    preserve_rng_state: bool = True,
    determinism_check: Check = "metadata",
    keep_decisions: bool = True,
    inputs: Inputs = "hold",
    **unknown: Any,
) -> Any:
    """Return a function with the results and gradients of `fn` that keeps less for its backward.

    Between forward and backward it keeps the inputs that the backward needs, and the values that `policy`
    saves and the backward reads. Other values are recomputed. The function works under plain autograd and
    under every `torch.func` transform, in any nesting.

    Args:
        fn: any callable: function, method, partial, `nn.Module`. Left out, `remat(...)` decorates.
        policy: what to save; a `Policy`, a callable from `OpInfo` to `Decision`, or a list of ops. None means
            `save_nothing`, as in JAX.
        name: what messages and reports call the region; by default the function's own name.
        static_argnums: positions of arguments that are passed through unchanged (no pytrees, no tensors).
        static_argnames: names of such keyword arguments.
        preserve_rng_state: draw the same random numbers in the recomputation.
        determinism_check: "metadata" compares shape, dtype and device of what is recomputed. "exact" compares
            all results bitwise and names the first op that differs. It is slow, and meant for debugging.
            "none" compares nothing.
        keep_decisions: keep integers and bools that are computed from floats, under every policy, if the
            recomputation would read them. Examples are indices of `topk` and masks of a comparison. Floats
            with other last bits must not select another expert. See docs/policies.md.
        inputs: "offload" has arguments wait in pinned host memory: those that an op has made with a history,
            from 1 MiB on. The last region's stay on the device. See docs/policies.md#offload.

    Returns:
        A function with `fn`'s signature, name and docstring; `fn` itself is its `__wrapped__`. For a module
            it is a module of the same class.

    Raises:
        RematError: arguments that cannot work (also a `TypeError` or `ValueError`). When called: a region
            that cannot be recomputed correctly, since it writes to arguments, or runs other ops or shapes
            again.

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

    This keeps `x @ w`, and recomputes `tanh` from it. Source of the idea:
    `jax.checkpoint` (https://docs.jax.dev/en/latest/gradient-checkpointing.html) and Chen et al., 2016,
    "Training deep nets with sublinear memory cost" (https://arxiv.org/abs/1604.06174).
    """
    if args or unknown:
        raise _option_error(fn, args, unknown)
    if determinism_check not in _CHECKS:
        raise WrongValue(
            f"remat(determinism_check={determinism_check!r}): expected one of {', '.join(map(repr, _CHECKS))}"
        )
    if inputs not in get_args(Inputs):
        raise WrongValue(
            f"remat(inputs={inputs!r}): expected 'hold' or 'offload'. What is kept of values inside is said "
            "by policy=..., such as policy=offload(save_matmuls)."
        )
    options = Options(
        policy_given(policy),
        name,
        _indices(static_argnums),
        _names(static_argnames),
        preserve_rng_state,
        determinism_check,
        keep_decisions,
        inputs,
    )
    return functools.partial(rematerialized, options=options) if fn is None else rematerialized(fn, options)


# Options of torch.utils.checkpoint and of jax.checkpoint, and what to write here.
_ELSEWHERE = {
    "use_reentrant": "leave it out: there is one kind of region, and it works as use_reentrant=False does; "
    "torch's call, checkpoint(fn, x, use_reentrant=False), is that of remat.interop.checkpoint",
    "context_fn": "write policy=..., such as save_matmuls or a list of ops to save; "
    "remat.interop.from_torch_policy takes a policy function of torch's",
    "prevent_cse": "leave it out: recomputation is always protected from the compiler",
    "concrete": "write static_argnums=... or static_argnames=... for arguments that Python branches on",
    "debug": 'write determinism_check="exact", which names the first op that differs',
    "early_stop": "leave it out: nothing is computed that the backward does not read",
    "save_policy": "write policy=...",
    "budget": "write policy=checkpoint_policy(budget=...)",
    "peak": "write policy=checkpoint_policy(peak=...)",
    "names": "write policy=save_names(...)",
    "layers": "write remat.apply(model, layers=...), which makes regions of a model's layers",
    "every": "write remat.apply(model, every=...), which makes regions of a model's layers",
}


class UnknownOption(RematError, TypeError):
    """Arguments of `remat` that it does not take."""


def _option_error(fn: Any, args: tuple[Any, ...], unknown: dict[str, Any]) -> UnknownOption:
    if args and isinstance(args[0], Policy):
        return UnknownOption(
            f"remat(fn, {args[0]!r}): options are given by name. Write remat(fn, policy={args[0]!r})."
        )
    if args:
        return UnknownOption(
            f"remat takes one function, got {len(args) + 1} arguments: remat(fn) returns a function. Write "
            "remat(fn)(x), or remat(fn, policy=...)(x); torch's checkpoint(fn, x, use_reentrant=False) "
            "is that of remat.interop.checkpoint."
        )
    return unknown_option("remat", unknown)


def unknown_option(who: str, unknown: dict[str, Any], *own: str) -> UnknownOption:
    """What is said of options that `who` does not take; `own` are those that it has beside `remat`'s."""
    name, options = next(iter(unknown)), [*own, *OPTIONS]
    near = difflib.get_close_matches(name, options, n=1)
    advice = _ELSEWHERE.get(name) or (
        f"did you mean {near[0]}?" if near else f"it takes {', '.join(options)}"
    )
    got = described(unknown[name]).partition(" of type ")[0]
    return UnknownOption(f"{who}({name}={got}): there is no such option; {advice}.".replace("?.", "?"))


def _indices(value: int | Iterable[int]) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    if bad := [n for n in numbers if not isinstance(n, int) or isinstance(n, bool)]:
        raise WrongValue(
            f"remat(static_argnums=...): expected positions of arguments such as static_argnums=(1,), got "
            f"{bad[0]!r}. Names go to static_argnames."
        )
    return numbers


def _names(value: str | Iterable[str]) -> frozenset[str]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if bad := [n for n in names if not isinstance(n, str)]:
        raise WrongValue(f"remat(static_argnames=...): expected strings, got {bad[0]!r}")
    return frozenset(names)


@overload
def checkpoint_policy(
    rule: Callable[[OpInfo], Decision | bool], *, stateful: bool = ..., modules: bool = ...
) -> Policy: ...


@overload
def checkpoint_policy(rule: PolicyLike | str, *, stateful: bool = ..., modules: bool = ...) -> Policy: ...


@overload
def checkpoint_policy(
    *,
    budget: float | int | str | None = ...,
    peak: int | str | None = ...,
    cost: str | CostModel = ...,
    device: Any = ...,
) -> BudgetPolicy: ...


@makes_policies
def checkpoint_policy(
    rule: Any = None,
    *,
    budget: float | int | str | None = None,
    peak: int | str | None = None,
    cost: str | CostModel = "roofline",
    device: Any = None,
    stateful: bool = False,
    modules: bool = False,
) -> Policy:
    """Make a policy value.

    Args:
        rule: a function from `OpInfo` to `Decision` or bool (also as a decorator). Or what is saved: an op, a
                `checkpoint_name`, or a collection of them. Or a policy.
        budget: instead of a rule. A float from 0 to 1 is a share of the bytes that no remat would keep for
            the region. An int, or a string such as `"2GiB"`, is bytes. What to keep is solved to optimality.
        peak: instead of a rule, or beside `budget`: the most bytes that may be live at once in forward and
            backward of the region, simulated. An int, or a string such as `"20GiB"`. Recomputes the least for
            it. For a model of many regions see `remat.fit(..., peak=...)`.
        cost: with these two, the model of what recomputation costs: `"roofline"`, or another that
            `remat.plan` knows.
        device: with these two, the device whose speed is meant; None means the one the tensors are on.
        stateful: with a function whose answers change from call to call: ask it in every forward. Otherwise a
            forward with the same ops as an earlier one has the verdicts of that one.
        modules: with a function that reads `info.module`, the path of the module that runs the op. In regions
            of functions it is asked in every forward then; in regions of modules as without.

    Returns:
        A policy; with `budget` or `peak` a `remat.plan.BudgetPolicy`, whose `plan(fn, *args)` tells the plan.

    Raises:
        RematError: neither or both of `rule` and `budget` or `peak`, or a rule that is none of the above.

    Example:
        >>> from remat import Decision, checkpoint_policy
        >>> @checkpoint_policy
        ... def small_ones(info):
        ...     return Decision.SAVE if info.bytes < 1024 else Decision.RECOMPUTE
        >>> small_ones
        checkpoint_policy(small_ones)
    """
    if (rule is None) == (budget is None and peak is None):
        got = "neither" if rule is None else "both"
        raise PolicyError(
            f"checkpoint_policy takes a rule or a budget, got {got}: write checkpoint_policy(my_rule), "
            f"checkpoint_policy([torch.ops.aten.mm]) or checkpoint_policy(budget=0.4)."
        )
    if rule is None:
        return _from_budget(budget, peak, cost, device)
    made = save_names(rule) if isinstance(rule, str) else as_policy(rule)
    if not (stateful or modules):
        return made
    if not isinstance(made, FromCallable):
        what, says = ("stateful", "asks_again") if stateful else ("modules", "needs_modules")
        raise PolicyError(
            f"checkpoint_policy({rule!r}, {what}=True): only a function is asked more. A policy of "
            f"your own says so by the class attribute {says} = True."
        )
    return RuleOfModules(made.rule, stateful) if modules else FromCallable(made.rule, stateful=True)


def _from_budget(
    budget: float | int | str | None, peak: int | str | None, cost: str | CostModel, device: Any
) -> BudgetPolicy:
    try:
        from remat.plan import BudgetPolicy, check_peak
    except ImportError as error:
        raise RematError(
            f"checkpoint_policy(budget=...) needs the planner and its solver: {to_install('plan')}. "
            f"Importing remat.plan failed with: {error}"
        ) from error
    limit = None if peak is None else check_peak(peak)
    return BudgetPolicy(1.0 if budget is None else budget, cost, device, peak=limit)
