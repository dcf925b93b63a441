"""Runs one case: `python -m benchmarks.suite.worker CASE.json ROWS.jsonl TIME`, started by `benchmarks run`.

At that time (seconds since the epoch) it is stopped: what would not be done by then is left out, and its rows
say so. For a panel `LOCK TIMED` may follow: a file that the processes beside this one lock too, and when
rounds have to end. TIME is when all before them has to end, then.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.measures import NEVER, Deadline, Turn
from benchmarks.common.records import Record, commit
from benchmarks.suite.cases import Case, Measured
from benchmarks.suite.fits import fits
from benchmarks.suite.panel import Panel
from benchmarks.suite.seconds import compile_seconds, plan_seconds
from remat.cli.commands.env import machine
from remat.cli.measure import Work


def panel(case: Case, deadline: Deadline, turn: Turn | None = None) -> Iterator[Measured]:
    if turn is not None:
        turn.together()
    return Panel.of(case, deadline, turn).run()


def records(case: Case, deadline: Deadline) -> Iterator[Measured]:
    """The rows of a benchmark that is a module of its own, at the size that fits into a suite."""
    from benchmarks.memory import Memory
    from benchmarks.overhead import Overhead

    # A fresh process takes as long as several rounds.
    rounds = case.rounds or 30
    processes = 3 if rounds > 10 else 2 if rounds > 5 else 1
    known: dict[str, Callable[[], list[Record]]] = {
        "memory": Memory(width=128, batch=1024).run,
        "overhead": Overhead(processes=processes, rounds=rounds // processes, kinds=()).run,
    }
    for record in known[case.model]():
        row = replace(Measured.of(case), mode=record.mode, peer=record.policy, metric=record.metric)
        numbers = {key: getattr(record, key) for key in ("unit", "value", "p20", "p50", "p80", "error")}
        yield replace(row, **numbers)
        if record.metric == "overhead per block":
            yield per_op(replace(row, **numbers))


def per_op(row: Measured) -> Measured:
    """The overhead of a block shared out among the ops of its forward."""
    from benchmarks.overhead import Block

    with Work() as work, torch.no_grad():
        Block(16, heads=2)(torch.randn(2, 8, 16))
    shared = {key: getattr(row, key) / work.ops.total() for key in ("value", "p20", "p50", "p80")}
    return replace(row, metric="overhead per op", **shared)


KINDS: dict[str, Callable[[Case, Deadline], Iterator[Measured]]] = {
    "panel": panel,
    "compile": compile_seconds,
    "fit": fits,
    "plan": plan_seconds,
    "records": records,
}


def context(case: Case) -> dict[str, Any]:
    """Machine, versions and commit: what a figure must be read with."""
    return machine(case.device) | {"commit": commit()}


def main(case_file: Path, rows_file: Path, deadline: Deadline = NEVER, turn: Turn | None = None) -> None:
    # What peers warn of (slow kernels under vmap, names that a model lacks, budgets out of reach) is known.
    warnings.simplefilter("ignore")
    case = Case.from_json(case_file.read_text())
    if case.threads:
        torch.set_num_threads(case.threads)
    # The GPU's fast products of float32, as everybody trains with; this changes nothing on a CPU.
    torch.set_float32_matmul_precision("high")
    # One network in 20 versions is compiled here, each for itself; the default limit is 8.
    torch._dynamo.config.recompile_limit = 64
    shared = context(case)
    with rows_file.open("a") as file:
        run = KINDS[case.kind] if turn is None else partial(panel, turn=turn)
        for row in run(case, deadline):
            print(json.dumps(shared | asdict(row)), file=file, flush=True)


if __name__ == "__main__":
    case_file, rows_file, end, *beside = sys.argv[1:]
    turn = Turn(Path(beside[0]), Deadline.until(float(beside[1]))) if beside else None
    main(Path(case_file), Path(rows_file), Deadline.until(float(end)), turn)
    # Some peers leave threads of their own behind, which need not be waited for.
    sys.stdout.flush()
    os._exit(0)
