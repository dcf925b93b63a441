"""`checkpoint_policy`: a policy from a rule, from ops and names, or from a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from remat._core import Decision, OpInfo
from remat.policies import (
    FromCallable,
    Policy,
    PolicyError,
    PolicyLike,
    as_policy,
    makes_policies,
    save_names,
)
from remat.transforms import RematError

if TYPE_CHECKING:
    from remat.plan import BudgetPolicy, CostModel


@overload
def checkpoint_policy(rule: Callable[[OpInfo], Decision | bool], *, stateful: bool = ...) -> Policy: ...


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


@makes_policies
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
    made = save_names(rule) if isinstance(rule, str) else as_policy(rule)
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
        from remat.plan import budget_policy
    except ImportError as error:
        raise RematError(
            "checkpoint_policy(budget=...) needs the planner and its solver: pip install 'remat[plan]'. "
            f"Importing remat.plan failed with: {error}"
        ) from error
    return budget_policy(budget, cost=cost, device=device, peak=peak)
