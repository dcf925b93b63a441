"""The charts of README and the site's front page.

    python -m benchmarks.front            # counts anew, writes benchmarks/results/front.csv, and draws
    python -m benchmarks.front --draw     # draws front.svg, depth.svg and frontier.svg in docs/figures

front.svg is of what was measured on an H100 (benchmarks/results/card.csv). The others are counted on fake
tensors, the same on every machine: a GPT of blocks 4096 wide, on 4 x 2048 tokens, in bfloat16 with flash
attention. depth.svg has the peak of a step against depth, simulated by the planner for eager. Gradients of
parameters count, parameters do not. frontier.svg has what 24 blocks keep, against the FLOPs that a step
recomputes: the planner's frontier, and policies.
"""

from __future__ import annotations

import csv
import itertools
import sys
import warnings
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.planner.models import GPTBlock
from benchmarks.suite.loaded import Results
from benchmarks.suite.plots import SHOWN, scatter
from remat import checkpoint_policy, fit, remat
from remat._core import Series, Spot, chart
from remat.plan import pareto

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "front.csv"
FIGURES = ROOT / "docs" / "figures"
CARD = ROOT / "benchmarks" / "results" / "card.csv"
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


def draw(points: list[Point], folder: Path = FIGURES) -> None:
    """One chart a file: what was measured on a card, and what is counted."""
    for name, svg in (("front", measured()), ("depth", depth(points)), ("frontier", budgets(points))):
        (folder / f"{name}.svg").write_text(svg)


def measured() -> str:
    """Peaks and times of a step on an H100, remat's rows beside those of torch and JAX."""
    results = Results.load(CARD)
    assert results is not None
    return scatter(results.panels()[0], SHOWN, "A step of 8 layers of Llama-3-8B, 8,192 tokens, one H100")


def depth(points: list[Point]) -> str:
    """The peak of a step against the number of blocks."""
    series = []
    for number, name in enumerate((*BUDGETS, FLOOR)):
        line = [Spot(p.x, p.bytes / 2**30) for p in points if (p.panel, p.line) == ("peak", name)]
        line[-1] = replace(line[-1], label=name)
        series.append(Series(line, (4, 0, 2, 4)[number], line=True, dots=False, dashed=name == FLOOR))
    return chart("A GPT of blocks 4096 wide", "blocks", "peak of a step, GiB", series)


def budgets(points: list[Point]) -> str:
    """What blocks keep against what a step recomputes: any budget, and policies."""
    planned = [Spot(p.x, p.bytes / 2**30) for p in points if (p.panel, p.line) == ("frontier", "remat")]
    planned.sort(key=lambda spot: (spot.x, -spot.y))
    free = min((spot for spot in planned if not spot.x), key=lambda spot: spot.y)
    named = [replace(planned[0], label="no remat"), replace(free, label='budget="free"')]
    named += [
        Spot(p.x, p.bytes / 2**30, p.line) for p in points if p.panel == "frontier" and p.line != "remat"
    ]
    series = [Series(planned, 0, line=True, dots=False), Series(named, 1)]
    return chart(f"{DEEP} blocks under any budget", "recomputed, % of a step's FLOPs", "kept, GiB", series)


def read() -> list[Point]:
    with RESULT.open() as file:
        return [Point(r["panel"], r["line"], float(r["x"]), int(r["bytes"])) for r in csv.DictReader(file)]


if __name__ == "__main__":
    draw(read() if "--draw" in sys.argv else write())
