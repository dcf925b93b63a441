"""One function under each of several policies, measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from remat._api import checkpoint_policy, remat
from remat._inspect.report.measure import Measured, measure
from remat._overrides import under_policy
from remat.policies import (
    Policy,
    PolicyLike,
    save_attention,
    save_everything,
    save_matmuls,
    save_nothing,
    save_weight_matmuls,
    several_given,
)
from remat.transforms import RematError

BUILT_IN: tuple[Policy, ...] = (
    save_nothing,
    save_matmuls,
    save_weight_matmuls,
    save_attention,
    save_matmuls | save_attention,
    save_everything,
)
_SHARES = (0.2, 0.4, 0.6, 0.8)


def under_each(
    fn: Callable[..., Any], args: Any, kwargs: Any, policies: Sequence[Policy]
) -> Iterator[tuple[Policy, Measured]]:
    """The function under each policy. Its regions take it; without regions the function is made one."""
    with under_policy(save_nothing):
        # Whatever their own policies are: one that keeps everything is no region to the engine.
        has_regions = bool(measure(fn, args, kwargs).regions)
    for policy in policies:
        with under_policy(policy) if has_regions else nullcontext():
            yield policy, measure(fn if has_regions else remat(fn, policy=policy), args, kwargs)


def each_of(
    fn: Callable[..., Any], args: Any, kwargs: Any, wanted: bool | Sequence[PolicyLike] | None
) -> Iterator[tuple[Policy, Measured]]:
    """The function under the policies of `explain(policies=wanted)`; for True the built-in ones and budgets.

    Of those, what cannot be planned and what comes out like another policy is left out.
    """
    if wanted is None or wanted is False:
        return iter(())
    if wanted is True:
        return _built_in(fn, args, kwargs)
    chosen = several_given("explain", wanted)
    if not chosen:
        raise RematError("explain(fn, policies=[]): give at least one policy, such as save_matmuls.")
    return under_each(fn, args, kwargs, chosen)


def _built_in(fn: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[tuple[Policy, Measured]]:
    found = {_figures(measured): (policy, measured) for policy, measured in _budgets(fn, args, kwargs)}
    for policy, measured in under_each(fn, args, kwargs, BUILT_IN):
        found.pop(_figures(measured), None)
        yield policy, measured
    yield from found.values()


def _budgets(fn: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[Policy, Measured]]:
    """A few budgets; none without the planner's solver, or of a function that needs data."""
    try:
        budgets = [checkpoint_policy(budget=share) for share in _SHARES]
        with warnings.catch_warnings():
            # A share may be less than the least; the least is what is shown then.
            warnings.simplefilter("ignore")
            return [*under_each(fn, args, kwargs, budgets)]
    except RematError:
        return []


def _figures(measured: Measured) -> tuple[Any, ...]:
    return measured.kept_bytes, measured.peak, measured.kept.host_bytes, measured.total("recompute")
