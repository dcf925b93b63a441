"""Bounds for every schedule of a compiled backward: the fewest recomputed FLOPs in a peak, the lowest peak.

The ops that depend on a cotangent run in the order of the graph, once each; nothing else is assumed:
values may be recomputed at any time, any number of times. At each such op some bytes are live in any case:
what earlier ones made and it or a later one reads, and what it reads of the forward. In the rest of the
peak lie the values from which all that later ops read must be made. To make it costs at least what the
planning problem of `remat.plan` costs with that many bytes, and so at least its LP bound.
"""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.planner.compiled import compiled_problem
from remat.plan.graph.costs import CostModel, flops_of
from remat.plan.joint import Joint, Op
from remat.plan.solve import Problem, bound, hull

# How many ops are looked at in each of this many stretches of the backward: those with the most bytes.
_LOOKS, _STRETCHES = 4, 16


class Work(CostModel):
    """FLOPs alone: what moves bytes is free."""

    @property
    def unit(self) -> str:
        return "FLOP"

    def price(self, joint: Joint, op: Op) -> float:
        return flops_of(joint, op)


class Bound:
    """Bounds for one graph; `forever` are the storages that stay once they are made."""

    def __init__(self, graph: Joint, forever: set[int]) -> None:
        self.graph, self.compiled = graph, compiled_problem(graph, Work())
        self.late = sorted(self.compiled.late)
        self.reads = [self._early(op) for op in self.late]
        sizes = [sum(graph.storages[graph.values[v].storage] for v in read) for read in self.reads]
        self.live = [made + read for made, read in zip(self._made(forever), sizes, strict=True)]
        self.corners = [(self.live[t], hull(self._after(t))) for t in self._looks()]

    @property
    def lowest(self) -> int:
        """No schedule has a lower peak."""
        return max(self.live)

    def flops(self, limit: int) -> float:
        """No schedule within this peak recomputes fewer; infinite where there is none."""
        best = 0.0
        for live, corners in self.corners:
            room = limit - live
            best = max(best, bound(corners, room) if room >= corners[0].bytes else math.inf)
        return best

    def _looks(self) -> list[int]:
        step = -(-len(self.late) // _STRETCHES)
        stretches = (range(k, min(k + step, len(self.late))) for k in range(0, len(self.late), step))
        return [t for times in stretches for t in sorted(times, key=lambda t: -self.live[t])[:_LOOKS]]

    def _early(self, position: int) -> set[int]:
        """What a late op reads of the forward, as the values to be kept for it."""
        values, problem = self.graph.values, self.compiled
        read = (v for v in self.graph.ops[position].reads if values[v].producer >= 0)
        return {problem.base[v] for v in read if values[v].producer not in problem.late}

    def _made(self, forever: set[int]) -> list[int]:
        """Bytes that late ops made and that are live at each of them."""
        values, first, last = self.graph.values, {}, {}
        for t, position in enumerate(self.late):
            op = self.graph.ops[position]
            for v in (*op.reads, *op.outputs):
                storage = values[v].storage
                if self.graph.owner[storage] in self.compiled.late:
                    first.setdefault(storage, t)
                    last[storage] = len(self.late) if storage in forever else t
        change = [0] * (len(self.late) + 2)
        for storage, t in first.items():
            change[t] += self.graph.storages[storage]
            change[last[storage] + 1] -= self.graph.storages[storage]
        live, total = [], 0
        for step in change[: len(self.late)]:
            total += step
            live.append(total)
        return live

    def _after(self, time: int) -> Problem:
        """The problem of making what ops after a time read; what is live at it anyway is free."""
        values, problem = self.graph.values, self.compiled.problem
        wanted = {v for position in self.late[time + 1 :] for v in self.graph.ops[position].reads}
        early = (v for v in {*wanted, *self.graph.gradients} if values[v].producer not in self.compiled.late)
        need = frozenset(v for v in early if values[v].origin != "tangent")
        free = (v in self.reads[time] or values[v].origin == "argument" for v in range(len(values)))
        size = tuple(0.0 if yes else size for yes, size in zip(free, problem.size, strict=True))
        return replace(problem, need=need, size=size)
