"""Markdown tables of a suite's results."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence

from benchmarks.common.records import Target
from benchmarks.suite.cases import Measured
from benchmarks.suite.loaded import MIB, Panel, Results
from benchmarks.suite.pareto import corner_of, hypervolume, time_ratios, undominated
from benchmarks.suite.suites import PAIRS

TORCH = ("torch", "torch_remat")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right: all columns but the first."""
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def code(name: str) -> str:
    # A bar ends a table's cell: the union of two policies is written with it escaped.
    return "`" + name.replace("|", "\\|") + "`"


def shown(row: Measured | None, text: Callable[[Measured], str]) -> str:
    return text(row) if row is not None and row.value is not None else ""


def mib(row: Measured) -> str:
    return f"{(row.value or 0) / MIB:.1f}"


def spread(row: Measured) -> str:
    return f"{row.p50 or 0:.1f} ({row.p20 or 0:.1f}-{row.p80 or 0:.1f})"


def panel_table(panel: Panel, peers: Sequence[str] = ()) -> str:
    """Every peer, or those named: what it keeps, its peak, what it computes again, its time; its error."""
    heads = ("peer", "kept MiB", "peak MiB", "recomputed GFLOP", "step ms (p20-p80)", "gradient differs")

    def line(peer: str) -> Sequence[str]:
        if panel.error(peer):
            error = textwrap.shorten(panel.error(peer), 100, placeholder=" ...")
            return (code(peer), error.replace("|", "\\|"), "", "", "", "")
        value = lambda metric: panel.value(peer, metric)  # noqa: E731
        return (
            code(peer),
            shown(value("kept"), mib),
            shown(value("peak"), mib),
            shown(value("recomputed"), lambda r: f"{(r.value or 0) / 1e9:.2f}"),
            shown(value("step"), spread),
            shown(value("gradient difference"), lambda r: f"{r.value:.0e}"),
        )

    rows = panel.peers if is_held_against_jax(panel) else not_jax(panel)
    return table(heads, [line(peer) for peer in rows if not peers or peer in peers])


def is_held_against_jax(panel: Panel) -> bool:
    """Whether JAX's rows say something: on a CPU XLA drops the barrier, so what is left of a checkpoint shows
    only beside JAX without one."""
    return panel.rows[0].device != "cpu" or panel.value("jax none", "step") is not None


def not_jax(panel: Panel) -> list[str]:
    return [peer for peer in panel.peers if not peer.startswith("jax ")]


def fronts_table(results: Results) -> str:
    """How much of the plane each family dominates, and which points of others none of ours dominates."""
    heads = ("panel", "remat", "torch", "JAX", "time at torch's memory", "not dominated by ours (factor)")
    return table(heads, [fronts_line(panel) for panel in results.panels() if panel.points("remat")])


def fronts_line(panel: Panel) -> Sequence[str]:
    everyone, ours = panel.points(), panel.points("remat", "none")
    corner = corner_of(everyone)
    # No remat is everybody's point.
    shares = [
        f"{hypervolume(panel.points(*families, 'none'), corner):.3f}" if panel.points(*families) else ""
        for families in (("remat",), TORCH, ("jax",))
    ]
    ratios = time_ratios(panel.points(*TORCH), ours) if panel.points(*TORCH) else []
    left = undominated([*panel.points(*TORCH), *panel.points("jax")], ours)
    names = ", ".join(f"{code(p.name)} ({amount(by)})" for p, by in left) or "none"
    return (panel.title, *shares, spelled(ratios), names)


def spelled(ratios: Sequence[float]) -> str:
    """Geometric mean and worst of our time over torch's, at each memory on torch's front."""
    if not ratios:
        return ""
    finite = [r for r in ratios if math.isfinite(r)]
    missing = len(ratios) - len(finite)
    text = f"{mean(finite):.2f} (worst {max(finite):.2f})" if finite else ""
    return f"{text}; {missing} not reached".removeprefix("; ") if missing else text


def mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def amount(factor: float) -> str:
    return f"{factor:.2f}" if math.isfinite(factor) else "inf"


def fits_table(results: Results) -> str:
    """The largest sizes, and how fast they run."""
    cases = dict.fromkeys(row.case for row in results.of_kind("fit"))
    lines = []
    for case in cases:
        rows = [row for row in results.rows if row.case == case]
        for peer in dict.fromkeys(row.peer for row in rows):
            mine = {row.metric: row for row in rows if row.peer == peer}
            largest = next((r for m, r in mine.items() if m.startswith("largest")), None)
            rate = next((r for m, r in mine.items() if m.endswith("a second")), None)
            value = mine["error"].error if "error" in mine else shown(largest, lambda r: f"{r.value:.0f}")
            lines.append((case.removeprefix("fit "), code(peer), value, shown(rate, spread)))
    return table(("model", "peer", "largest", "a second at it (p20-p80)"), lines)


def seconds_table(results: Results) -> str:
    """Compile times and planning times."""
    rows = [row for kind in ("compile", "plan") for row in results.of_kind(kind) if row.peer]
    lines = [
        (
            f"{r.model}, {r.depth} blocks",
            code(r.peer),
            r.error or r.metric,
            shown(r, lambda r: f"{r.value:.2f}"),
        )
        for r in rows
    ]
    return table(("model", "peer", "what", "s"), lines)


def overhead_table(results: Results) -> str:
    rows = [r for r in results.rows if r.metric == "overhead per block" and r.peer != "none"]
    several = len(set(results.torch)) > 1
    versions = dict(zip(map(id, results.rows), results.torch, strict=True))
    name = lambda r: code(r.peer) + (f" torch {versions[id(r)]}" if several else "")  # noqa: E731
    per_op = {(r.peer, versions[id(r)]): r for r in results.rows if r.metric == "overhead per op"}
    lines = [(name(r), shown(r, spread), shown(per_op.get((r.peer, versions[id(r)])), spread)) for r in rows]
    return table(("row", "us a block (p20-p80)", "us an op of its forward"), lines)


def pairs_table(results: Results) -> str:
    """Ours over torch's row with the same verdicts: the peak, and the median of the rounds' ratios."""
    lines = []
    for panel in results.panels():
        for policy, rival in PAIRS.items():
            mine, theirs = panel.value(policy, "peak"), panel.value(rival, "peak")
            time = panel.value(policy, f"step over {rival}")
            if mine and theirs and time:
                share = (mine.value or math.nan) / (theirs.value or math.nan)
                rounds = shown(time, lambda r: f"{r.value:.3f} ({r.p20:.3f}-{r.p80:.3f})")
                lines.append((panel.title, code(policy), code(rival), f"{share:.3f}", rounds))
    return table(("step", "ours", "torch's", "peak", "time (p20-p80)"), lines)


def unmeasured_table(results: Results) -> str:
    """Cases that were not run, or not to their end."""
    return table(
        ("case", "why"), [(row.case, row.error) for row in results.rows if row.error and not row.peer]
    )


def targets(results: Results) -> list[Target]:
    """What issue 7 claims for an H200; the limits are part of the claim."""
    found = []
    for panel in results.panels():
        # Where time was too short for ours, nothing was missed: nothing was measured.
        if panel.rows[0].engine != "compiled" or not panel.points("remat"):
            continue
        ours = panel.points("remat", "none")
        ratios = time_ratios(panel.points(*TORCH), ours) if panel.points(*TORCH) else []
        if ratios:
            found.append(
                Target(f"{panel.title}: time over torch's best, worst memory point", max(ratios), 1.0)
            )
            found.append(Target(f"{panel.title}: the same, geometric mean", mean(ratios), 0.95))
        found += against_jax(panel)
    return found + batches(results)


def against_jax(panel: Panel) -> list[Target]:
    """None on a CPU: XLA drops the barrier there, so that JAX's checkpoint is hardly one."""
    if panel.rows[0].device == "cpu":
        return []
    mine = {point.name: point for point in panel.points("remat", "none")}
    pairs = [(mine.get(p.name.removeprefix("jax ")), p) for p in panel.points("jax")]
    return [
        Target(f"{panel.title}: {what} of {o.name} over JAX's", getattr(o, what) / getattr(p, what), 0.9)
        for o, p in pairs
        if o is not None
        for what in ("memory", "time")
    ]


def batches(results: Results) -> list[Target]:
    """Torch SAC's largest batch over the largest of ours that is as fast; 1 / 1.2 is the claim."""
    found = []
    for case in dict.fromkeys(row.case for row in results.of_kind("fit")):
        rows = [row for row in results.rows if row.case == case]
        sizes = {r.peer: r.value or 0.0 for r in rows if r.metric.startswith("largest")}
        # As fast as its p20: medians of equals differ, too.
        slowest = [r.p20 or 0.0 for r in rows if r.peer == "torch SAC" and r.metric.endswith("a second")]
        rates = {r.peer: r.value or 0.0 for r in rows if r.metric.endswith("a second")}
        if "torch SAC" not in rates:
            continue
        family = {row.peer: row.family for row in rows}
        as_fast = [p for p in rates if family[p] == "remat" and rates[p] >= slowest[0]]
        best = max((sizes[p] for p in as_fast), default=0.0)
        found.append(
            Target(
                f"{case}: torch SAC's over ours at its throughput",
                # Infinite: none of ours is as fast.
                sizes["torch SAC"] / best if best else math.inf,
                1 / 1.2,
            )
        )
    return found


def targets_table(results: Results) -> str:
    lines = [
        (t.claim, "not measured" if t.value is None else f"{t.value:.3f}", f"{t.limit:.3f}", verdict(t))
        for t in targets(results)
    ]
    return table(("claim", "value", "at most", "verdict"), lines)


def verdict(target: Target) -> str:
    if target.met or target.value is None:
        return "met" if target.met else "missed"
    return (
        f"missed by {100 * (target.value / target.limit - 1):.0f} %"
        if math.isfinite(target.value)
        else "missed"
    )
