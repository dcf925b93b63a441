"""Keep, recompute and offload in one plan, against planners that do one of the two: simulated, no device.

    python -m benchmarks.planner.host

32 Llama-8B blocks, 8192 tokens, bfloat16, on an H100 by its roofline, with the link of PCIe 5 and of GH200.
Every planner may keep the same bytes between forward and backward; what is on its way to and fro counts. A
row says by how much a step is longer than one that keeps everything: recomputation, and waiting for the link.

- `joint`: this library's exact plan. `recompute`: the same without a host. `fit`: the whole call, with
  the tracing of the model.
- `offload`: nothing is recomputed: as many values go as the bytes ask for, and wait where the link is full.
- `greedy`: values one by one, by price per byte: those of the lowest price are recomputed, the others
  offloaded while the window lasts, kept while there is room. All blocks alike. So does torchtitan's
  auto_perf_maxing, by its description; its code is not run here.
- `torch dp`, `torch ilp`, `torch greedy`: the cheapest plan of torch's budget that fits, of 41 budgets, all
  blocks alike. It knows no host.

Who uses the link may use less of the window, in steps of 1/32: what is on its way takes room.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.common.models import Around, named
from benchmarks.common.records import RESULTS
from remat import checkpoint_policy, fit, remat
from remat.plan import LINKS, cost_model, plans_by_budget, step_of
from remat.plan.compared import SOLVERS, torch_plan
from remat.plan.graph import Graph
from remat.plan.joined import over_link, windows
from remat.plan.model import union
from remat.plan.solve import INF, Problem, complete, keep_all, least, solve

CSV = RESULTS / "planner_host.csv"
FIELDS = ("link", "kept_gib", "planner", "longer_ms", "share_of_step", "host_gib", "gap", "seconds")
BLOCKS, SHARES = 32, (0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)
GIB = 2**30
# Longer by so many seconds, bytes on the host, the proven gap, seconds of planning.
Row = tuple[float, float, float, float]


def blocks(depth: int) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    """A model of so many blocks, and what it is called with, on tensors without data."""
    model: Any = named("llama3-8b", device="cuda", depth=depth)
    with torch.device("meta"):
        params = [
            {key: torch.empty(shape, dtype=torch.bfloat16) for key, (shape, _) in model.shapes().items()}
            for _ in range(depth)
        ]
        x = torch.empty(1, 8192, 4096, dtype=torch.bfloat16, requires_grad=True)
    for tensor in [tensor for block in params for tensor in block.values()]:
        tensor.requires_grad_()
    loss, _ = model.bind(Around(lambda fn: remat(fn, policy=checkpoint_policy(budget=1.0))))
    return lambda x: loss({"blocks": params}, x * 1), x


def one_block() -> Graph:
    """One block's graph."""
    fn, x = blocks(1)
    return step_of(fn, (x,), {}, wanted=plans_by_budget, device="h100").graphs[0]


def torch_plans(graph: Graph, problem: Problem, solver: str) -> list[tuple[int, float, float]]:
    """Bytes that torch's plans keep, what they recompute in seconds, and seconds of planning."""
    # Torch's partitioner takes functional graphs. A norm here adds its epsilon in place.
    add = torch.ops.aten.add.Scalar
    ops = [replace(op, target=add, mutates=()) if op.mutates else op for op in graph.joint.ops]
    joint, found = replace(graph.joint, ops=tuple(ops)), []
    for step in range(41):
        start = time.process_time()
        plan = torch_plan(joint, step / 40, solver)
        seconds = time.process_time() - start
        bases = {joint.family[joint.values[v].storage][0] for v in plan.values}
        solution = complete(problem, graph.places(bases))
        assert solution is not None
        found.append((solution.bytes, solution.cost, seconds))
    return found


class Rivals:
    """What each planner does within a budget."""

    def __init__(self, graph: Graph, problem: Problem, speed: float) -> None:
        self.graph, self.problem, self.speed = graph, problem, speed
        self.plans: dict[str, list[tuple[int, float, float]]] = {}
        window = windows([problem] * 2, speed)[0]
        everything, self.low = keep_all(problem), least(problem)
        assert everything is not None
        self.everything = everything
        most = min(window, everything.bytes)
        self.windows = [part * most / 32 for part in range(1, 33)]

    def joint(self, budget: float) -> Row | None:
        start = time.process_time()
        found = over_link([self.graph] * BLOCKS, [self.problem] * BLOCKS, int(budget), self.speed)
        seconds = time.process_time() - start
        if found is None or found.joined.cost > found.alone:
            without = self.recompute(budget)
            if found is None or (without is not None and without[0] <= found.joined.cost):
                return without
            seconds += without[3] if without else 0.0
        joined = found.joined
        return joined.cost, sum(placed.host for placed in joined.regions), joined.gap, seconds

    def recompute(self, budget: float) -> Row | None:
        if budget < BLOCKS * self.low.bytes:
            return None
        start = time.process_time()
        found = solve(union([self.problem] * BLOCKS), budget, time_limit=2.0)
        return found.solution.cost, 0, found.gap, time.process_time() - start

    def fitted(self, budget: float) -> Row:
        fn, x = blocks(BLOCKS)
        start = time.process_time()
        plan = fit(fn, x, budget=int(budget), link=self.speed, device="h100")
        seconds = time.process_time() - start
        return plan.cost, sum(region.sent_bytes for region in plan.regions), plan.gap, seconds

    def offload(self, budget: float) -> Row | None:
        return min(filter(None, (self._offload(budget, window) for window in self.windows)), default=None)

    def _offload(self, budget: float, window: float) -> Row | None:
        """All but the block's input goes where it must; what is beyond the window waits, out and in."""
        room = budget - 2 * window
        must = max(0.0, BLOCKS * self.everything.bytes - room)
        if room < BLOCKS * self.low.bytes:
            return None
        # What the last block keeps is read at once.
        return 2 * max(0.0, must - (BLOCKS - 1) * window) / self.speed, must, 0.0, 0.0

    def greedy(self, budget: float) -> Row | None:
        return min(filter(None, (self._greedy(budget, window) for window in self.windows)), default=None)

    def _greedy(self, budget: float, window: float) -> Row | None:
        start = time.process_time()
        kept = set(self.everything.saved)
        while True:
            solution = complete(self.problem, kept)
            assert solution is not None
            host = self._sent(solution.saved, window)
            if BLOCKS * solution.bytes - (BLOCKS - 1) * host + 2 * host <= budget:
                return BLOCKS * solution.cost, (BLOCKS - 1) * host, 0.0, time.process_time() - start
            tried = [
                ((other.cost - solution.cost) / (solution.bytes - other.bytes), v)
                for v in solution.saved
                if (other := complete(self.problem, kept - {v})) is not None and other.bytes < solution.bytes
            ]
            if not tried:
                return None
            kept.discard(min(tried)[1])

    def _sent(self, saved: frozenset[int], window: float) -> float:
        """Bytes that go within the window, the largest first."""
        left = window
        for size in sorted((self.problem.size[v] for v in saved if v < len(self.graph.ops)), reverse=True):
            left -= size if size <= left else 0
        return window - left

    def torch(self, solver: str, budget: float) -> Row | None:
        if solver not in self.plans:
            self.plans[solver] = torch_plans(self.graph, self.problem, solver)
        fitting = [(cost, seconds) for size, cost, seconds in self.plans[solver] if BLOCKS * size <= budget]
        if not fitting:
            return None
        cost, seconds = min(fitting)
        return BLOCKS * cost, 0.0, 0.0, seconds


def rows() -> Iterator[dict[str, str]]:
    """One row for each link, budget and planner."""
    graph = one_block()
    problem = graph.problem(cost_model("roofline", "h100"))
    # A backward is two forwards' worth of matmuls.
    step = 3 * BLOCKS * sum(c for c in problem.cost if c < INF)
    for link in ("pcie5", "gh200"):
        rivals = Rivals(graph, problem, LINKS[link])
        planners: dict[str, Callable[[float], Row | None]] = {
            "joint": rivals.joint,
            "fit": rivals.fitted,
            "recompute": rivals.recompute,
            "offload": rivals.offload,
            "greedy": rivals.greedy,
        }
        planners |= {f"torch {solver}": partial(rivals.torch, solver) for solver in SOLVERS}
        for share in SHARES:
            budget = share * BLOCKS * graph.kept_by_default
            for name, planner in planners.items():
                if (found := planner(budget)) is None:
                    continue
                longer, host, gap, seconds = found
                facts = link, f"{budget / GIB:.2f}", name, f"{1e3 * longer:.2f}", f"{longer / step:.4f}"
                more = f"{host / GIB:.2f}", f"{gap:.5f}", f"{seconds:.2f}"
                yield dict(zip(FIELDS, (*facts, *more), strict=True))


def main() -> None:
    found = []
    for row in rows():
        print(*row.values(), sep="\t", flush=True)
        found.append(row)
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
