"""What a sweep leaves behind: a table or JSON on stdout, a CSV, a chart."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.cli.bench import Result
from remat.cli.commands.env import machine

if TYPE_CHECKING:
    from remat.cli.commands.sweep import Sweep

MIB = 1 << 20


def write(sweep: Sweep, results: list[Result]) -> None:
    """`sweep.csv` and `sweep.png` in the folder of the sweep, then the table or the JSON."""
    facts, options = machine(sweep.device), described(sweep)
    write_csv(sweep.out / "sweep.csv", facts | options, results)
    draw(sweep.out / "sweep.png", title(options), results)
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


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Callable[[float], None]]:
    """A bar on stderr, so that stdout holds the result alone; yields what moves it by a share."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    if not (quiet or console.is_terminal):
        # In a pipe or a log a line for every tenth of the work.
        yield _Lines(console).advance
        return
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("training under each policy", total=1.0)
        yield lambda share: bar.advance(task, share)


class _Lines:
    """Progress as lines."""

    def __init__(self, console: Any) -> None:
        self.console, self.share, self.said = console, 0.0, -1

    def advance(self, share: float) -> None:
        self.share += share
        tenth = int(10 * self.share + 1e-6)
        if tenth > self.said:
            self.said = tenth
            self.console.print(f"training under each policy: {10 * tenth} %", highlight=False)


def show(facts: dict[str, Any], options: dict[str, Any], results: list[Result], out: Path) -> None:
    """Print the table, errors, the verdict, and where the files are."""
    from rich.console import Console

    grid = table(title(options), results)
    # A table cut to fit would lose figures; a narrow terminal wraps its lines instead.
    needed = Console(width=10_000).measure(grid).maximum
    console = Console(width=max(Console().width, needed))
    console.print(f"{facts['hardware']}, {facts['cpu_count']} cores, torch {facts['torch']}", style="dim")
    console.print(grid)
    for result in results:
        if result.error is not None:
            console.print(f"[bold]{result.policy}[/bold] {result.error.splitlines()[0]}", highlight=False)
    console.print(verdict(results))
    console.print(f"{out / 'sweep.csv'}  {out / 'sweep.png'}", style="dim")


def verdict(results: list[Result]) -> str:
    """Whether all gradients agree, and which rows failed, in rich's markup."""
    wrong = [result.policy for result in results if result.wrong]
    failed = [result.policy for result in results if result.failed]
    texts = (
        [f"[red]wrong gradients: {', '.join(wrong)}[/red]"] if wrong else ["gradients agree with no remat"]
    )
    return "\n".join([*texts, *([f"[red]failed: {', '.join(failed)}[/red]"] if failed else [])])


# Heading, unit or empty, and how a cell is made of a row.
COLUMNS: list[tuple[str, Callable[[Result], str]]] = [
    ("policy", lambda r: r.policy),
    ("kept\nMiB", lambda r: f"{(r.kept_bytes or 0) / MIB:.1f}"),
    ("peak\nMiB", lambda r: f"{(r.peak_bytes or 0) / MIB:.1f}"),
    ("ops\nagain", lambda r: f"{r.ops_recomputed}"),
    ("GFLOP\nagain", lambda r: f"{(r.flops_recomputed or 0) / 1e9:.2f}"),
    ("step ms\nmedian", lambda r: f"{r.step_ms_p50:.0f}"),
    ("step ms\np20-p80", lambda r: f"{r.step_ms_p20:.0f}-{r.step_ms_p80:.0f}"),
    ("loss\nfirst, last", lambda r: f"{r.loss_first:.3f} {r.loss_last:.3f}"),
    ("loss\ndiffers", lambda r: f"{r.loss_difference:.1e}"),
    ("gradient\ndiffers", lambda r: f"{r.gradient_difference:.1e}"),
]


def table(heading: str, results: list[Result]) -> Any:
    """The rows as a table of rich; wrong ones are red, rivals dim."""
    from rich import box
    from rich.table import Table

    grid = Table(title=heading, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for name, _ in COLUMNS:
        grid.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for result in results:
        cells = [cell(result) if result.error is None else "error" for _, cell in COLUMNS[1:]]
        grid.add_row(
            result.policy,
            *cells,
            style="red" if result.wrong or result.failed else "dim" if result.rival else "",
        )
    return grid


def draw(path: Path, heading: str, results: list[Result]) -> None:
    """Peak memory against step time, one point a row, with the spread of the time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot's: no window system is asked for and nothing global is left.
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(
        title=heading, ylabel="peak memory, MiB", xlabel="step time, ms: median, p20 to p80"
    )
    for index, result in enumerate(results):
        if result.error is None:
            point(axes, index, result)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)


def point(axes: Any, index: int, result: Result) -> None:
    """Rivals are squares, all others circles."""
    assert result.step_ms_p20 and result.step_ms_p50 and result.step_ms_p80 and result.peak_bytes
    x, y = result.step_ms_p50, result.peak_bytes / MIB
    spread = [[x - result.step_ms_p20], [result.step_ms_p80 - x]]
    marker = "s" if result.rival else "o"
    axes.errorbar(x, y, xerr=spread, fmt=marker, capsize=3, color=f"C{index}", label=result.policy)
