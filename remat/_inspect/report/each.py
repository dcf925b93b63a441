"""One function under each of several policies, measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from remat._api import checkpoint_policy, remat
from remat._forced import under_policy
from remat._inspect.report.measure import Measured, measure
from remat.policies import (
    Policy,
    as_policy,
    save_attention,
    save_everything,
    save_matmuls,
    save_nothing,
    save_weight_matmuls,
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


def frontier_of(
    fn: Callable[..., Any], args: Any, kwargs: Any, wanted: Any
) -> tuple[tuple[Policy, Measured], ...]:
    """The function under the policies of `explain(frontier=wanted)`; for True the built-in ones and budgets.

    Of those, what cannot be planned and what comes out like another policy is left out.
    """
    if wanted is not True:
        return tuple(under_each(fn, args, kwargs, tuple(map(as_policy, wanted or ()))))
    found = list(under_each(fn, args, kwargs, BUILT_IN))
    seen = {_figures(measured) for _, measured in found}
    try:
        budgets = [checkpoint_policy(budget=share) for share in _SHARES]
        with warnings.catch_warnings():
            # A share may be less than the least; the least is what is shown then.
            warnings.simplefilter("ignore")
            for policy, measured in under_each(fn, args, kwargs, budgets):
                if _figures(measured) not in seen:
                    seen.add(_figures(measured))
                    found.append((policy, measured))
    except RematError:
        # Without the planner's solver, or of a function that needs data.
        pass
    return tuple(found)


def _figures(measured: Measured) -> tuple[Any, ...]:
    return measured.kept_bytes, measured.peak, measured.kept.host_bytes, measured.total("recompute")
