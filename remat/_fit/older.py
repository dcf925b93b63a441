"""`plan_model` and `plan_chain`, for the version before: `fit` has taken them in."""

from __future__ import annotations

from typing import Any

from remat._fit.fitting import fit
from remat.plan import plan_regions, plan_stages


def plan_model(fn: Any, /, *args: Any, **options: Any) -> Any:
    """Deprecated: `remat.fit`, which makes regions of a module's blocks in place."""
    options.pop("time_limit", None)
    return (fit if {"mesh", "memory"} & options.keys() else plan_regions)(fn, *args, **options)


def plan_chain(stages: Any, x: Any, *args: Any, **options: Any) -> Any:
    """Deprecated: `remat.fit` of a list of stages."""
    return plan_stages(stages, x, *args, **options)
