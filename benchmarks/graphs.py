"""Compiled graphs for a GPU that need not be there: peak, kept bytes and roofline time of every peer.

    python -m benchmarks.graphs --models llama3-8b

Models in their published sizes, in bfloat16, on fake tensors. All figures are compiled for the card, not run
on it (`remat.gpu`): they are counts, the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import tyro
from einops import rearrange
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.measures import recover, told
from benchmarks.models import HuggingFace, Problem, named
from benchmarks.peers import peer
from benchmarks.records import Record, Target, conclude, ratio
from remat.gpu import MARK, GpuReport, compile_for

# Blocks of each model; all else is `benchmarks.models.SIZES`.
DEPTHS = {"llama3-8b": 8, "gpt2-xl": 8, "vit-l": 24, "unet": 4, "moe": 4, "hf-llama": 4}
# Ours, and torch's row with the same verdicts.
PAIRS = {"save_nothing": "torch checkpoint", "save_matmuls": "torch SAC"}


@dataclass
class Graphs:
    """Peak memory and roofline time of a compiled step of each peer, for a GPU."""

    models: tuple[str, ...] = tuple(DEPTHS)
    """Models, by their names in `benchmarks.models.SIZES`."""
    peers: tuple[str, ...] = ("none", *PAIRS, *PAIRS.values(), "save_matmuls | save_attention")
    """Rows."""
    device: str = "h100"
    """a100, h100, h200 or b200."""
    depth: int = 0
    """Blocks; 0: as in `DEPTHS`."""
    save: bool = True
    """Write results/graphs.csv; what it holds of other models stays."""

    def __call__(self) -> int:
        missed = 0
        for model in self.models:
            records = list(self.run(model))
            title = f"{model} for {self.device}: {MARK}"
            missed += conclude("graphs", title, records, targets(records), self.save, beside=True)
        return int(bool(missed))

    def run(self, model: str) -> Iterator[Record]:
        """Rows of one model under every peer."""
        built: Any = named(model, "cuda", depth=self.depth or DEPTHS.get(model, 8))
        mode = f"{model}, {built.depth} blocks, {built.batch} x {built.seq}, {self.device}"
        # What einops sets up at its first call is nothing that a compiler may see.
        rearrange(torch.zeros(1, 1), "a b -> b a")
        if isinstance(built, HuggingFace):  # its weights cannot be cast as fake tensors
            problem = built.problem(torch.device("meta"), torch.bfloat16, 0)
        else:
            with FakeTensorMode():
                problem = built.problem(torch.device("cpu"), torch.bfloat16, 0)
        for name in self.peers:
            try:
                yield from rows(mode, name, compiled(problem, name, self.device))
            except Exception as error:
                yield replace(Record("graphs", mode, name, "peak", "MiB"), error=told(error))
                recover(error)


def compiled(problem: Problem, name: str, device: str) -> GpuReport:
    """The report of one peer's step: the loss, and its gradient by all parameters."""
    loss, leaves = problem.bind(peer(name).around)
    params = leaves(problem.params)
    with peer(name).compiling():
        return compile_for(device, loss, params, problem.batch, machine_code=False)


def rows(mode: str, name: str, report: GpuReport) -> Iterator[Record]:
    for metric, unit, value in (
        ("peak", "MiB", report.peak / 2**20),
        ("kept", "MiB", report.kept / 2**20),
        ("roofline", "ms", 1e3 * report.seconds),
        ("FLOPs", "TFLOP", report.flops / 1e12),
        ("launches", "kernels", len(report.kernels)),
        ("survived", "regions", sum(region.survived for region in report.regions)),
    ):
        yield Record("graphs", mode, name, metric, unit, value)


def targets(records: list[Record]) -> list[Target]:
    """What issue 17 asks for."""
    found = []
    for mode in dict.fromkeys(record.mode for record in records):
        for policy, rival in PAIRS.items():
            for metric, limit in (("peak", 1.0), ("roofline", 1.02)):
                share = ratio([r for r in records if r.metric == metric], mode, policy, rival)
                found.append(Target(f"{mode}: {metric} of {policy} over {rival}", share, limit))
    return found


if __name__ == "__main__":
    raise SystemExit(tyro.cli(Graphs)())
