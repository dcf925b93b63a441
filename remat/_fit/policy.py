"""The policy of a block that was made to fit: its plans, and a share of the bytes where it runs other ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat.plan import BudgetPolicy, Graph, Plan


@dataclass(frozen=True)
class Made:
    """A plan, and the sizes of the storages of the forward that it was made for.

    Ops are of the same shapes where storages have the same sizes. What autograd would keep does not tell: of
    an argument that all blocks share, such as a rotary table, a step's graph counts nothing.
    """

    plan: Plan
    sizes: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Fitted(BudgetPolicy):
    """Plans for the ops that they were made for; in other modes and shapes the same share of the bytes."""

    made: tuple[Made, ...] = ()

    def __repr__(self) -> str:
        if not self.made:
            return super().__repr__()
        kept = " and ".join(f"{made.plan.kept_bytes:,}" for made in self.made)
        return f"<plan that keeps {kept} bytes>"

    def _plan(self, graph: Graph, fn: Callable[..., Any]) -> Plan:
        for made in self.made:
            if (graph.names, graph.joint.sizes) == (made.plan.ops, made.sizes):
                return made.plan
        return super()._plan(graph, fn)
