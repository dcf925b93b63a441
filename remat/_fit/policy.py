"""The policy of a block that was made to fit: its plan, and a share of the bytes where it runs other ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat.plan import BudgetPolicy, Plan, carried, graph_of
from remat.policies import Policy
from remat.transforms.joint import NotOnFakes


@dataclass(frozen=True, repr=False)
class Fitted(BudgetPolicy):
    """A plan for the ops that it was made for; in other modes and shapes the same share of the bytes."""

    plan_made: Plan | None = None

    def __repr__(self) -> str:
        made = self.plan_made
        return super().__repr__() if made is None else f"<plan that keeps {made.kept_bytes:,} bytes>"

    def bind(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        made = self.plan_made
        try:
            if made is not None and graph_of(fn, args, kwargs).names == made.ops:
                return carried([made])
        except NotOnFakes:
            pass
        return super().bind(fn, args, kwargs)
