"""The picture of README and the site's front page: counted on fake tensors, the same on every machine.

    python -m benchmarks.front     # writes benchmarks/results/front.csv and docs/figures/front.png

A GPT of blocks 4096 wide, on 4 x 2048 tokens, in bfloat16 with flash attention. Left: the peak of a step
against depth, simulated by the planner for eager. Gradients of parameters count, parameters do not.
Right: what 24 blocks keep, against the FLOPs that a step recomputes: the planner's frontier, and policies.
"""

from __future__ import annotations

import csv
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.planner.models import GPTBlock
from remat import checkpoint_policy, fit, remat
from remat.plan import pareto

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "front.csv"
FIGURE = ROOT / "docs" / "figures" / "front.png"
DEPTHS = (1, 4, 8, 16, 24, 32)
DEEP = 24
BUDGETS: dict[str, Any] = {
    "no remat": 1.0,
    'budget="free"': "free",
    "budget=0.3": 0.3,
}
FLOOR = "gradients alone"
POLICIES = ("save_nothing", "save_matmuls", "save_attention")


@dataclass(frozen=True)
class Point:
    """A point of a panel; `x` is blocks or percent of a step's FLOPs, `bytes` the height."""

    panel: str
    line: str
    x: float
    bytes: int


def model() -> tuple[torch.nn.Module, torch.Tensor]:
    with torch.device("meta"):
        block = GPTBlock(4096, 32).bfloat16()
        return block, torch.empty(4, 2048, 4096, dtype=torch.bfloat16, requires_grad=True)


def peaks() -> Iterator[Point]:
    block, x = model()
    for (name, budget), depth in itertools.product(BUDGETS.items(), DEPTHS):
        with torch.device("meta"):
            blocks = [GPTBlock(4096, 32).bfloat16() for _ in range(depth)]
        regions = [remat(one, policy=checkpoint_policy(budget=0.5)) for one in blocks]

        def stack(x: torch.Tensor, regions: Any = regions) -> torch.Tensor:
            for region in regions:
                x = region(x)
            return x

        with warnings.catch_warnings():
            # The least that is possible is what is asked for.
            warnings.simplefilter("ignore")
            plan = fit(stack, x, budget=budget, cost="flops")
        yield Point("peak", name, depth, plan.peak_bytes)
        if name == "no remat":
            yield Point("peak", FLOOR, depth, depth * sum(p.nbytes for p in block.parameters()))


def frontier() -> Iterator[Point]:
    block, x = model()
    found = pareto(block, x, cost="flops", points=40, torch_solvers=())
    for planner in ("remat", *POLICIES):
        for point in found.of(planner):
            yield Point("frontier", planner, 100 * point.replay_share, DEEP * point.kept_bytes)


def write() -> list[Point]:
    points = [*peaks(), *frontier()]
    with RESULT.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(Point.__dataclass_fields__)
        rows.writerows(map(astuple, points))
    return points


def draw(points: list[Point], path: Path = FIGURE) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), dpi=110)
    colours = {"no remat": "#444444", 'budget="free"': "#0072b2", "budget=0.3": "#009e73", FLOOR: "#999999"}
    for name, colour in colours.items():
        line = [(p.x, p.bytes / 2**30) for p in points if p.panel == "peak" and p.line == name]
        left.plot(*zip(*line, strict=True), color=colour, ls="--" if name == FLOOR else "-")
        above = {"budget=0.3": 5, FLOOR: -6}.get(name, 0)
        left.annotate(name, line[-1], (6, above), textcoords="offset points", va="center", color=colour)
    left.set(xlabel="blocks", ylabel="peak of a step, GiB", title="Memory against depth", ylim=(0, None))
    left.set_xlim(0, DEPTHS[-1] * 1.4)
    left.set_xticks([0, 8, 16, 24, 32])
    planned = [(p.x, p.bytes / 2**30) for p in points if p.panel == "frontier" and p.line == "remat"]
    planned.sort(key=lambda at: (at[0], -at[1]))
    right.plot(*zip(*planned, strict=True), color="#0072b2", label="any budget, solved exactly")
    free = min((at for at in planned if at[0] == 0), key=lambda at: at[1])
    named = [("no remat", planned[0]), ('budget="free"', free)]
    named += [(p.line, (p.x, p.bytes / 2**30)) for p in points if p.panel == "frontier" and p.line != "remat"]
    for name, at in named:
        right.plot(*at, "o", color="#d55e00", markersize=5)
        right.annotate(name, at, (7, 3), textcoords="offset points", fontsize=9)
    right.set(xlabel="recomputed, % of a step's FLOPs", ylabel="kept, GiB", title=f"What {DEEP} blocks keep")
    right.set(xlim=(-0.5, 36), ylim=(0, None))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def read() -> list[Point]:
    with RESULT.open() as file:
        return [Point(r["panel"], r["line"], float(r["x"]), int(r["bytes"])) for r in csv.DictReader(file)]


if __name__ == "__main__":
    draw(write())
