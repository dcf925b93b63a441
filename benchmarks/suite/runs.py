"""`python -m benchmarks run`: a suite, each case in a process of its own, into one long CSV.

Rows are written as cases end; a run that was interrupted goes on where it stopped. A case that fails, dies or
takes too long is a row that says so.
"""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.common.records import RESULTS, commit
from benchmarks.plans import check
from benchmarks.suite.cases import NO_TIME, Case, Measured
from benchmarks.suite.suites import SUITES
from remat.cli.commands.env import processor

ROOT = Path(__file__).parents[2]
# How much longer than expected a case may take before it is stopped, and seconds beside that: on a shared
# machine, and where the run as a whole may not take long.
PATIENCE, HURRY = (8.0, 300.0), (1.5, 30.0)
# Seconds in which no process gets anywhere: most go into importing torch.
LEAST = 15.0
# The shares of the time after which panels that run side by side are prepared, and timed.
TOGETHER = (0.55, 0.75)
# A part of a suite, in minutes: of ten, what is left is for starting, for stopping and for the files.
PART = 9.3


@dataclass
class Run:
    """Run a suite, or go on with one that was interrupted."""

    suite: Literal["quick", "cpu", "plans", "pairs", "card", "rehearsal", "versions"] = "quick"
    """quick: README's figures, ten minutes on 2 cores. cpu: everything a CPU can do, about an hour.
    plans: budgets against ready policies; fails where a planned point is beaten.
    pairs: compiled steps of ours beside torch's with the same verdicts.
    card: published sizes on one GPU, in two parts of ten minutes. rehearsal: its cases in miniature on a CPU,
    for an --out of its own. versions: small cases for each --python."""
    out: Path = RESULTS
    """Folder for SUITE.csv."""
    part: int = 0
    """card only: 1 or 2, the first or the second half of the cases; 0: all."""
    minutes: float = 0.0
    """Stop after so many; what was not reached is recorded as not run. 0: no limit, 9.3 for a part."""
    python: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An interpreter to run the cases with, and with its torch; may be given several times."""
    jobs: int = 1
    """Panels that prepare at the same time, each in its process; then one at a time is timed. For a
    GPU, where compiling on one core takes longest. Of `--minutes` half is for the first, a fifth for the
    second, and the rest for the other cases."""
    fresh: bool = False
    """Measure everything anew. Otherwise cases of this commit that are in the CSV already are left out."""
    dry_run: bool = False
    """Run nothing; list the cases with the memory and FLOPs that fake tensors of their sizes tell."""

    def __call__(self) -> int:
        cases = halves(SUITES[self.suite](), self.part)
        limit = self.minutes or (PART if self.part else math.inf)
        if self.dry_run:
            from benchmarks.suite.dry import show

            parts = [cases] if self.part or self.suite != "card" else [halves(cases, part) for part in (1, 2)]
            return show(parts, limit if self.suite != "card" else PART)
        path = self.out / f"{self.suite}.csv"
        status = execute(cases, path, self.python or (sys.executable,), limit, self.fresh, self.jobs)
        return check(path) or status if self.suite == "plans" else status


def halves(cases: list[Case], part: int) -> list[Case]:
    """Part 1 or 2: as many cases from the front as make half of the expected seconds, or the others."""
    if not part:
        return cases
    half, spent, first = sum(case.seconds for case in cases) / 2, 0.0, []
    for case in cases:
        if spent + case.seconds / 2 < half:
            first.append(case)
        spent += case.seconds
    return first if part == 1 else cases[len(first) :]


def execute(
    cases: list[Case], path: Path, pythons: tuple[str, ...], minutes: float, fresh: bool, jobs: int = 1
) -> int:
    """Runs what is not in the CSV yet; the exit status, 1 when a process failed or time ran out."""
    versions = {python: torch_version(python) for python in pythons}
    wanted = [(python, case) for python in pythons for case in cases]
    keys = {(case.name, versions[python]) for python, case in wanted}
    old = [] if fresh else measured(path)
    done = {key_of(row) for row in old} - {key_of(row) for row in old if wanting(row)}
    # All is there: no interrupted run, so measure again. Rows of the other part or torch stay.
    again = keys if keys <= done else keys - done
    todo = [(python, case) for python, case in wanted if (case.name, versions[python]) in again]
    count = len(todo)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, [row for row in old if key_of(row) not in again])
    watch = Watch(sum(case.seconds for _, case in todo), time.perf_counter() + 60 * minutes)
    failures = skipped = 0
    with watch.shown(len(todo)) as advance:
        if jobs > 1:
            panels = [(python, case) for python, case in todo if case.kind == "panel" and not case.alone]
            failures = beside_each_other(panels, path, watch, advance, jobs)
            todo = [job for job in todo if job not in panels]
        for python, case in todo:
            if not watch.allows(case):
                skipped += 1
                write(path, [failure(case, versions[python], NO_TIME)], append=True)
                continue
            start = time.perf_counter()
            rows, error = run_case(case, python, watch.patience(case))
            write(path, rows, append=True)
            failures += bool(error)
            advance(case, time.perf_counter() - start, error)
    print(f"{path}: {count - skipped} cases, {failures} failed, {skipped} not run for lack of time")
    return int(bool(failures or skipped))


def beside_each_other(todo: list[tuple[str, Case]], path: Path, watch: Watch, advance: Any, jobs: int) -> int:
    """All these panels, `jobs` of them at a time up to where they are timed; how many failed."""
    writing, left = threading.Lock(), min(watch.left(), sum(watch.patience(case) for _, case in todo))
    began = time.perf_counter()
    prepared, timed = (time.time() + share * left for share in TOGETHER)

    def one(job: tuple[str, Case]) -> bool:
        python, case = job
        start = time.perf_counter()
        rows, error = run_case(case, python, max(began + left - start, 0.0), (prepared, timed, lock))
        with writing:
            write(path, rows, append=True)
            advance(case, time.perf_counter() - start, error)
        return bool(error)

    with tempfile.NamedTemporaryFile() as file, ThreadPoolExecutor(jobs) as pool:
        lock = file.name
        return sum(pool.map(one, todo))


class Watch:
    """How long is left: expected seconds, scaled by how the cases so far took against what was expected."""

    def __init__(self, expected: float, deadline: float) -> None:
        self.expected, self.deadline = expected, deadline
        self.done = self.spent = 0.0

    def left(self) -> float:
        return self.deadline - time.perf_counter()

    def pace(self) -> float:
        return self.spent / self.done if self.done else 1.0

    def patience(self, case: Case) -> float:
        """Seconds after which the case is stopped."""
        times, beside = PATIENCE if math.isinf(self.deadline) else HURRY
        return min(self.left(), times * case.seconds + beside)

    def allows(self, case: Case) -> bool:
        """Whether half of it could be done: a case leaves out the last of its peers where time is short."""
        return max(0.5 * case.seconds * max(self.pace(), 0.5), LEAST) <= self.left()

    @contextmanager
    def shown(self, count: int) -> Iterator[Any]:
        """A bar on a terminal, and one line a case."""
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task("benchmarks", total=count)

            def advance(case: Case, seconds: float, error: str) -> None:
                self.done, self.spent = self.done + case.seconds, self.spent + seconds
                minutes = (self.expected - self.done) * self.pace() / 60
                progress.console.print(
                    f"{case.name}: {error or f'{seconds:.0f} s'}; about {max(minutes, 0):.1f} minutes left",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
                progress.advance(task)

            yield advance


def run_case(
    case: Case, python: str, timeout: float, beside: tuple[float, float, str] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """The rows of one case; and, where its process failed, why: that is the last row then.

    Args:
        beside: of a case that runs beside others, when its preparations and when its times have to end, and
            the file that all lock.
    """
    with tempfile.TemporaryDirectory() as folder:
        todo, rows = Path(folder) / "case.json", Path(folder) / "rows.jsonl"
        todo.write_text(case.to_json())
        rows.touch()
        ends = [str(time.time() + timeout)] if beside is None else [str(beside[0]), beside[2], str(beside[1])]
        command = [python, "-m", "benchmarks.suite.worker", str(todo), str(rows), *ends]
        error = ended(command, os.environ | settings(case, folder), Path(folder) / "said", timeout)
        # A line that a process was stopped in has no end.
        found = [json.loads(line) for line in rows.read_text().splitlines(True) if line.endswith("\n")]
    return found + ([failure(case, torch_version(python), error)] if error else []), error


def ended(command: list[str], environment: dict[str, str], said: Path, timeout: float) -> str:
    """Runs a command to its end or its timeout; what went wrong, or nothing."""
    with said.open("w") as file:
        # Into a file: a pipe ends when the compiler's processes do, which outlive the one that started them.
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"stopped after {timeout:.0f} s"
        finally:
            # The compiler's processes, too.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = said.read_text(errors="replace").strip().splitlines() or ["no word"]
    return f"process ended with {status}: {lines[-1]}"[:300] if status else ""


def failure(case: Case, torch: str, error: str) -> dict[str, Any]:
    """The row of a case that was not run, or not to its end."""
    shared = {"torch": torch, "hardware": processor(), "commit": commit()}
    return shared | asdict(Measured.of(case).failed(error))


def settings(case: Case, folder: str) -> dict[str, str]:
    """The environment of a case's process: this checkout's code, a compiler's cache of its own."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    found = {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": folder, "KINETO_LOG_LEVEL": "99"}
    # Prices are of the minutes in which steps are timed: a machine that is shared is not always as fast.
    found["REMAT_CACHE"] = folder
    # Freed memory stays with the process, as on a GPU: page faults of one peer are not to be time of another.
    found |= dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), "4000000000")
    if case.threads:
        # JAX's thread pools have no other switch.
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        found |= {"OMP_NUM_THREADS": str(case.threads), "XLA_FLAGS": flags, "NPROC": str(case.threads)}
    return found


def torch_version(python: str) -> str:
    """What the interpreter's torch calls itself, as in the CSV; without the seconds of importing it."""
    code = (
        "import importlib.util, pathlib\n"
        "torch = pathlib.Path(importlib.util.find_spec('torch').origin)\n"
        "exec(torch.with_name('version.py').read_text())\n"
        "print(__version__)"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def measured(path: Path) -> list[dict[str, Any]]:
    """Rows in the CSV that were measured at this commit."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["commit"] == commit()]


def key_of(row: dict[str, Any]) -> tuple[str, str]:
    return row["case"], row["torch"]


def wanting(row: dict[str, Any]) -> bool:
    """Whether its case is to be run again: its process failed, or time was too short for it or for a peer."""
    return row["metric"] == "error" and (not row["peer"] or row["error"] == NO_TIME)


def write(path: Path, rows: list[dict[str, Any]], append: bool = False) -> None:
    columns = [*CONTEXT, *Measured.__dataclass_fields__]
    with path.open("a" if append else "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
        if not append:
            writer.writeheader()
        writer.writerows(rows)


# Of `remat.cli.commands.env.machine` and of the worker.
CONTEXT = ("remat", "torch", "python", "hardware", "accelerator", "cpu_count", "threads", "commit")
