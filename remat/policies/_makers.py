"""Policies from what users have at hand: a function, ops, names, a budget."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from remat.policies._base import FromCallable, Policy, PolicyError, PolicyLike
from remat.policies._ready import is_op, offload_names, save_all_but_names, save_names, save_ops
from remat.policies._selective import offload, save_cheaper_than, save_every, save_larger_than, where
from remat.transforms.errors import RematError

if TYPE_CHECKING:
    from remat.plan import BudgetPolicy, CostModel


@overload
def checkpoint_policy(rule: PolicyLike | str, *, stateful: bool = ...) -> Policy: ...


@overload
def checkpoint_policy(
    *,
    budget: float | int | str | None = ...,
    peak: int | str | None = ...,
    cost: str | CostModel = ...,
    device: Any = ...,
) -> BudgetPolicy: ...


def checkpoint_policy(
    rule: Any = None,
    *,
    budget: float | int | str | None = None,
    peak: int | str | None = None,
    cost: str | CostModel = "roofline",
    device: Any = None,
    stateful: bool = False,
) -> Policy:
    """Make a policy value.

    Args:
        rule: a function from `OpInfo` to `Decision` or bool (also as a decorator); or an op or a collection
            of ops, which are saved; or a `checkpoint_name` or a collection of them, likewise; or a policy.
        budget: instead of a rule. A float from 0 to 1 is the share of the bytes that no remat would keep for
            the region, an int or a string such as `"2GiB"` is bytes. What to keep is solved to optimality.
        peak: instead of a rule, also beside `budget`: the most bytes that may be live at once in forward and
            backward of the region, simulated; an int or a string such as `"20GiB"`. Recomputes the least
            for it. For a model of many regions see `remat.plan_model(..., peak=...)`.
        cost: with these two, the model of what recomputation costs: `"roofline"`, or another that
            `remat.plan` knows.
        device: with these two, the device whose speed is meant; None means the one the tensors are on.
        stateful: with a function: its answers change from call to call, so it is asked in every forward.
            Otherwise a forward that runs the same ops as one before it has the verdicts of that one.

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
    made = save_names(rule) if isinstance(rule, str) else policy_from(rule)
    if not stateful:
        return made
    if not isinstance(made, FromCallable):
        raise PolicyError(
            f"checkpoint_policy({rule!r}, stateful=True): only a function can change its mind. A policy of "
            "your own says so by the class attribute asks_again = True."
        )
    return FromCallable(made.rule, stateful=True)


def _from_budget(
    budget: float | int | str | None, peak: int | str | None, cost: str | CostModel, device: Any
) -> BudgetPolicy:
    try:
        from remat.plan import budget_policy  # type: ignore[reportMissingImports]
    except ImportError as error:
        raise RematError(
            "checkpoint_policy(budget=...) needs the planner and its solver: pip install 'remat[plan]'. "
            f"Importing remat.plan failed with: {error}"
        ) from error
    return budget_policy(budget, cost=cost, device=device, peak=peak)


def policy_from(value: Any) -> Policy:
    """See `remat.policies.as_policy`."""
    if isinstance(value, Policy):
        return value
    # Ops and classes are callable too, so they are told apart before plain functions.
    if is_op(value):
        return save_ops(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _from_collection(value)
    # A builtin is torch.mm, a mistaken op: a rule takes an OpInfo, which no builtin does.
    no_rule = isinstance(value, (type, types.BuiltinFunctionType)) or any(value is maker for maker in _MAKERS)
    if not callable(value) or no_rule:
        raise PolicyError(f"policy got {value!r} of type {type(value).__name__}. {_way_out(value)}")
    rule: Callable[..., Any] = value
    return FromCallable(rule)


def _from_collection(values: Any) -> Policy:
    names = [value for value in values if isinstance(value, str)]
    ops = [value for value in values if not isinstance(value, str)]
    if not names:
        return save_ops(*ops)
    return save_names(*names) | save_ops(*ops) if ops else save_names(*names)


def _way_out(value: Any) -> str:
    if value is None:
        return "Write policy=save_nothing (recompute everything) or save_everything (as without remat)."
    if isinstance(value, str):
        return (
            f"A string is no policy: write policy=remat.{value} for a ready policy of that name, or "
            f"policy=save_names({value!r}) to save the values that checkpoint_name gave that name."
        )
    if isinstance(value, type):
        return f"A class is no policy: write an instance, policy={value.__name__}(...)."
    if isinstance(value, types.FunctionType):
        return f"{value.__name__} makes policies: call it, policy={value.__name__}(...)."
    return (
        "Write a ready policy such as save_matmuls, a function from OpInfo to Decision, a list of ops such "
        "as [torch.ops.aten.mm.default], or save_names('q', 'k')."
    )


_MAKERS = (
    *(checkpoint_policy, save_ops, save_names, save_all_but_names, offload_names),
    *(where, offload, save_every, save_larger_than, save_cheaper_than),
)
