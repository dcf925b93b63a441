"""`compare`, for the version before: `explain` has taken it in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from remat._inspect.report.each import BUILT_IN
from remat._inspect.report.explain import Explanation, explain
from remat.policies import PolicyLike


def compare(
    fn: Callable[..., Any], /, *args: Any, policies: Sequence[PolicyLike] | None = None, **keywords: Any
) -> Explanation:
    """Deprecated: write `explain(fn, *args, policies=...)`."""
    return explain(fn, *args, policies=BUILT_IN if policies is None else policies, **keywords)
