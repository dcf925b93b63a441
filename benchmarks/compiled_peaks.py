"""Predicted and measured peaks of compiled steps on this CPU, for the models of the suite.

    python -m benchmarks.compiled_peaks [model ...]

A step is traced on shapes, and Inductor writes its wrapper for the CPU. The wrapper's own allocations,
executed on shapes, are the prediction: no kernel is compiled for it. Then the step is compiled and run, and
the bytes that it allocates are read from the profiler. There is a row for each model and policy in
`benchmarks/results/compiled_peaks.csv`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.common.models import named
from benchmarks.common.peers import peer
from benchmarks.common.records import RESULTS
from benchmarks.common.steps import backward
from benchmarks.fit_peaks import tabulate
from remat.cli.measure import trace_memory
from remat.gpu import Simulation, trace
from remat.gpu.inductor import lowered

CSV = RESULTS / "compiled_peaks.csv"
FIELDS = ("model", "policy", "predicted", "measured", "error", "kept", "kept_measured", "seconds")
POLICIES = ("none", "save_nothing", "budget 0.5")


def rows(name: str) -> Iterator[dict[str, Any]]:
    """One row for each policy of a model of two blocks."""
    problem = named(name, depth=2).problem(torch.device("cpu"), torch.float32, 0)
    for policy in POLICIES:
        torch.compiler.reset()
        loss, leaves = problem.bind(peer(policy).around)
        start = time.process_time()
        predicted, kept = foretold(loss, leaves(problem.params), problem.batch)
        seconds = time.process_time() - start
        torch.compiler.reset()
        loss, leaves = problem.bind(peer(policy).around)
        step = partial(backward(loss, leaves, torch.compile), problem.params, problem.batch)
        step(lambda: None)
        found = trace_memory(step)
        error = predicted / found.peak - 1
        facts = (name, policy, predicted, found.peak, f"{error:.4f}", kept, found.kept, f"{seconds:.1f}")
        yield dict(zip(FIELDS, facts, strict=True))


def foretold(loss: Any, own: Any, batch: Any) -> tuple[int, int]:
    """The peak of a step's wrappers and what the forward's keeps for the backward's, in bytes."""
    traces, _ = trace(loss, (own, batch), {})
    assert traces.forward is not None and traces.backward is not None
    first = lowered(traces.forward, None, False, False)
    run = Simulation(first, None)
    peak = run.execution.peak
    run.backward(lowered(traces.backward, None, True, False, traces.donated, first.strides))
    return max(peak, run.execution.peak), run.kept


if __name__ == "__main__":
    tabulate(sys.argv[1:], rows, FIELDS, CSV)
