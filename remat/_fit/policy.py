"""The policy of a block that was made to fit: its plan, and a share of the bytes where it runs other ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat.plan import BudgetPolicy, Graph, Plan


@dataclass(frozen=True, repr=False)
class Fitted(BudgetPolicy):
    """A plan for the ops that it was made for; in other modes and shapes the same share of the bytes.

    Ops are of the same shapes where storages have the same sizes, `sizes`. What autograd would keep does not
    tell: of an argument that all blocks share, such as a rotary table, a step's graph counts nothing.
    """

    plan_made: Plan | None = None
    sizes: tuple[int, ...] = ()

    def __repr__(self) -> str:
        made = self.plan_made
        return super().__repr__() if made is None else f"<plan that keeps {made.kept_bytes:,} bytes>"

    def _plan(self, graph: Graph, fn: Callable[..., Any]) -> Plan:
        made = self.plan_made
        if made is not None and (graph.names, graph.joint.storages) == (made.ops, self.sizes):
            return made
        return super()._plan(graph, fn)
