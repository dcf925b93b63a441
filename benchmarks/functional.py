"""CPU time of regions under and around torch.func: 12 tiny transformer blocks (16 wide), parameters in dicts.

    python -m benchmarks.functional

At this size the time is bookkeeping and dispatch, not arithmetic. Rows take turns in every round, each step
after one of its own kind, and a row is a multiple of no remat in the same round: medians over the rounds of
several fresh processes, in the process's CPU time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.func import grad, jvp, vmap

from benchmarks.common.records import Record, Target, conclude
from benchmarks.overhead import function_block, in_processes, parameters, times
from remat import checkpoint_policy, remat, save_matmuls, save_nothing
from remat.cli.measure import percentiles

Params = dict[str, Tensor]
# At most so many times no remat; policies and budgets at most 1.15 of `save_nothing`.
LIMITS = {"torch.func.grad": 3.5, "vmap(grad)": 4.0, "jvp": 1.15, "jvp(grad)": 3.0, "grad inside": 3.5}
LIMITS["grad(grad)"] = 4.0
POLICIES = {
    "save_nothing": save_nothing,
    "save_matmuls": save_matmuls,
    "budget 0.5": checkpoint_policy(budget=0.5),
}


@dataclass
class Functional:
    """Times no remat of steps under transforms of torch.func."""

    depth: int = 12
    """Blocks."""
    width: int = 16
    """Width of a block."""
    processes: int = 3
    """Processes, one after another."""
    rounds: int = 8
    """Interleaved rounds in a process, after the warm-up."""
    steps: int = 2
    """Steps of a turn that count."""
    save: bool = True
    """Write results/functional.csv."""

    def __call__(self) -> int:
        records = self.run()
        title = f"{self.depth} transformer blocks, {self.width} wide, under torch.func: times no remat"
        return conclude("functional", title, records, targets(records), self.save)

    def run(self) -> list[Record]:
        found = in_processes(self.measure, self.processes)
        records = []
        for way in found[0]:
            rounds = [taken for process in found for taken in process[way]]
            for name in POLICIES:
                p20, p50, p80 = percentiles([taken[name] / taken["none"] for taken in rounds])
                records.append(
                    Record("functional", way, name, "CPU time", "times no remat", p50, p20, p50, p80)
                )
        return records

    def measure(self) -> dict[str, list[dict[str, float]]]:
        """By way of differentiating: the rounds of one process, CPU seconds of a step of each row."""
        torch.set_num_threads(1)
        taken = {}
        for way in ("backward", *LIMITS):
            block = descending_block if way == "grad inside" else function_block
            rows = {
                "none": block,
                **{name: remat(block, policy=policy) for name, policy in POLICIES.items()},
            }
            steps = {name: self.step(way, one) for name, one in rows.items()}
            times(steps, self.steps)
            taken[way] = [times(steps, self.steps) for _ in range(self.rounds)]
        return taken

    def step(self, way: str, one: Callable[[Params, Tensor], Tensor]) -> Callable[[], Any]:
        params, x = parameters(self.depth, self.width), torch.randn(2, 8, self.width)
        batch = torch.randn(4, *x.shape)
        along = [{k: torch.randn_like(v) for k, v in own.items()} for own in params]

        def loss(params: list[Params], x: Tensor) -> Tensor:
            for own in params:
                x = one(own, x)
            return x.square().sum()

        if way in ("backward", "grad inside"):
            leaves = [{k: v.requires_grad_() for k, v in own.items()} for own in params]
            return lambda: loss(leaves, x).backward()

        def norm(params: list[Params]) -> Tensor:
            found = [g for own in grad(loss)(params, x) for g in own.values()]
            return torch.stack([g.square().sum() for g in found]).sum()

        return {
            "grad(grad)": lambda: grad(norm)(params),
            "torch.func.grad": lambda: grad(loss)(params, x),
            "vmap(grad)": lambda: vmap(grad(loss), (None, 0))(params, batch),
            "jvp": lambda: jvp(loss, (params, x), (along, x)),
            "jvp(grad)": lambda: jvp(lambda p: grad(loss)(p, x), (params,), (along,)),
        }[way]


def descending_block(params: Params, x: Tensor) -> Tensor:
    """A step down the gradient of an energy, by torch.func: forces, implicit layers."""
    return x - 0.1 * grad(lambda x: function_block(params, x).square().sum())(x)


def targets(records: list[Record]) -> list[Target]:
    """What is claimed; the limits are part of the claim."""
    value = {(record.mode, record.policy): record.value or 0.0 for record in records}
    found = [
        Target(f"{way}: save_nothing", value[way, "save_nothing"], limit) for way, limit in LIMITS.items()
    ]
    return found + [
        Target(f"{way}: {name} over save_nothing", value[way, name] / value[way, "save_nothing"], 1.15)
        for way in LIMITS
        for name in POLICIES
        if name != "save_nothing"
    ]


if __name__ == "__main__":
    raise SystemExit(tyro.cli(Functional)())
