"""`python -m remat plan MODULE:FN --budget ...`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from remat.cli.checked import writable
from remat.cli.errors import UsageError
from remat.cli.rows import amount
from remat.cli.target import load
from remat.plan import BudgetPolicy, pareto


@dataclass
class Plan:
    """Plan what a function keeps for its backward. Without --budget: the whole frontier.

    Nothing is computed: any size can be planned on any machine.
    """

    target: Annotated[str, tyro.conf.Positional]
    """MODULE:FN, FN a function or module of tensors, or one of no arguments that returns (fn, *args)."""
    input: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A tensor argument, as 4x128x256; once for each."""
    dtype: str = "float32"
    """Of the inputs."""
    budget: str = ""
    """0.4 (a share), 2GiB or 1000000 (bytes), or "free"."""
    cost: Literal["flops", "roofline", "measured"] = "roofline"
    """What recomputation is counted in."""
    device: str = ""
    """What the cost model is of, such as h100 or cpu; left out, this machine's accelerator."""
    points: int = 10
    """Budgets on the frontier."""
    json: bool = False
    """Print one JSON object: the plan, or the frontier."""
    out: Path | None = None
    """Write the plan there, as JSON that remat.plan.Plan.from_json reads."""
    csv: Path | None = None
    """Write the frontier there."""
    png: Path | None = None
    """Draw the frontier there."""

    def __call__(self) -> int:
        for option, path in (("--out", self.out), ("--csv", self.csv), ("--png", self.png)):
            writable(option, path)
        if self.out and not self.budget:
            raise UsageError(
                f"--out {self.out} is for one plan: write --budget too, or --csv for the frontier."
            )
        fn, args = load(self.target, self.input, self.dtype)
        if self.budget:
            self._one(fn, args)
        if self.csv or self.png or not self.budget:
            self._frontier(fn, args)
        return 0

    def _one(self, fn: Any, args: Any) -> None:
        plan = BudgetPolicy(amount(self.budget), self.cost, self.device or None).plan(fn, *args)
        print(plan.to_json() if self.json else plan)
        if self.out:
            self.out.write_text(plan.to_json())

    def _frontier(self, fn: Any, args: Any) -> None:
        frontier = pareto(fn, *args, cost=self.cost, device=self.device or None, points=self.points)
        if not self.budget:
            print(dumps(asdict(frontier), indent=2) if self.json else frontier)
        if self.csv:
            frontier.to_csv(self.csv)
        if self.png:
            frontier.plot(self.png)
