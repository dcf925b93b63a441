"""What a sweep leaves behind: a table or JSON on stdout, a CSV, a chart."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat._core import Page, Series, Spot, Table, as_text, chart
from remat.cli.bench import Result
from remat.cli.commands.env import machine

if TYPE_CHECKING:
    from remat.cli.commands.sweep import Sweep

MIB = 1 << 20


def write(sweep: Sweep, results: list[Result]) -> None:
    """`sweep.csv` and `sweep.svg` in the folder of the sweep, then the table or the JSON."""
    facts, options = machine(sweep.device), described(sweep)
    write_csv(sweep.out / "sweep.csv", facts | options, results)
    (sweep.out / "sweep.svg").write_text(drawn(title(options), results))
    if sweep.json:
        print(
            json.dumps({"machine": facts, "options": options, "rows": list(map(asdict, results))}, indent=2)
        )
    else:
        show(facts, options, results, sweep.out)


def described(sweep: Sweep) -> dict[str, Any]:
    """The options that decide what the figures mean."""
    options = {key: value for key, value in vars(sweep).items() if key not in ("policy", "out", "json")}
    return {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}


def title(options: dict[str, Any]) -> str:
    """The heading of table and chart: the model and its sizes."""
    text = "{model}, {mode}: depth {depth}, width {width}, {heads} heads, {batch} x {seq} bytes, {dtype}"
    return f"{text}, {{device}}".format(**options)


def write_csv(path: Path, context: dict[str, Any], results: list[Result]) -> None:
    """One line for each row of the sweep; each repeats machine and options."""
    records = [context | asdict(result) for result in results]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows(records)


def progress(quiet: bool) -> Callable[[float], None]:
    """What moves the progress on stderr by a share: stdout holds the result alone."""
    share, said = 0.0, -1

    def advance(more: float) -> None:
        nonlocal share, said
        share += more
        tenth = int(10 * share + 1e-6)
        if tenth > said and not quiet:
            said = tenth
            # A bar on a terminal, a line for every tenth of the work in a pipe or a log.
            end = "\r" if sys.stderr.isatty() and tenth < 10 else "\n"
            print(f"training under each policy: {10 * tenth} %", file=sys.stderr, end=end, flush=True)

    return advance


def show(facts: dict[str, Any], options: dict[str, Any], results: list[Result], out: Path) -> None:
    """Print the table, errors, the verdict, and where the files are."""
    head = f"{facts['hardware']}, {facts['cpu_count']} cores, torch {facts['torch']}"
    print(as_text(Page((head,), (table(title(options), results),))) + "\n")
    for result in results:
        if result.error is not None:
            print(f"{result.policy}: {result.error.splitlines()[0]}")
    print(verdict(results))
    print(f"{out / 'sweep.csv'}  {out / 'sweep.svg'}")


def verdict(results: list[Result]) -> str:
    """Whether all gradients agree, and which rows failed."""
    wrong = [result.policy for result in results if result.wrong]
    failed = [result.policy for result in results if result.failed]
    said = f"wrong gradients: {', '.join(wrong)}" if wrong else "gradients agree with no remat"
    return said + (f"\nfailed: {', '.join(failed)}" if failed else "")


# Heading, and how a cell is made of a row.
COLUMNS: list[tuple[str, Callable[[Result], str]]] = [
    (">kept MiB", lambda r: f"{(r.kept_bytes or 0) / MIB:.1f}"),
    (">peak MiB", lambda r: f"{(r.peak_bytes or 0) / MIB:.1f}"),
    (">recomputed ops", lambda r: f"{r.ops_recomputed}"),
    (">recomputed GFLOP", lambda r: f"{(r.flops_recomputed or 0) / 1e9:.2f}"),
    (">step ms median", lambda r: f"{r.step_ms_p50:.0f}"),
    (">step ms p20-p80", lambda r: f"{r.step_ms_p20:.0f}-{r.step_ms_p80:.0f}"),
    (">loss first, last", lambda r: f"{r.loss_first:.3f} {r.loss_last:.3f}"),
    (">loss differs", lambda r: f"{r.loss_difference:.1e}"),
    (">gradient differs", lambda r: f"{r.gradient_difference:.1e}"),
]


def table(heading: str, results: list[Result]) -> Table:
    """The rows as a table."""
    blank = ["error", *[""] * (len(COLUMNS) - 1)]
    rows = [(r.policy, *([cell(r) for _, cell in COLUMNS] if r.error is None else blank)) for r in results]
    return Table(heading, ("policy", *[name for name, _ in COLUMNS]), tuple(rows))


def drawn(heading: str, results: list[Result]) -> str:
    """Peak memory against step time, one point a row, with the spread of the time, as an SVG."""
    colour = {"none": 4} | {result.policy: 1 for result in results if result.rival}
    series = [Series([point(r)], colour.get(r.policy, 0)) for r in results if r.error is None]
    return chart(heading, "step, ms: median, p20 to p80", "peak, MiB", series, zero=(False, False))


def point(result: Result) -> Spot:
    """A policy's step time and peak, with the spread of the time from p20 to p80."""
    assert result.step_ms_p20 and result.step_ms_p50 and result.step_ms_p80 and result.peak_bytes
    spread = result.step_ms_p20, result.step_ms_p80
    return Spot(result.step_ms_p50, result.peak_bytes / MIB, result.policy, spread)
