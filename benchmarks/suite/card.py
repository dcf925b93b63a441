"""How far what is compiled for a card (`benchmarks.graphs`) is from what a card measures (suite `card`)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common.peers import is_planned, peer
from benchmarks.suite import tables
from benchmarks.suite.graph_tables import Row, panels_of, value
from benchmarks.suite.loaded import MIB, Panel, Results

# The largest error of the simulation, as a share of what is measured.
MOST = {"peak": 0.05, "time": 0.15}


def simulated(rows: list[Row], results: Results | None) -> str:
    """A table of what both have: the same model, sizes, mode and peer, compiled as whole graphs.

    Peaks are those of any card. Times are compared on the card that the graphs are compiled for: with those
    of its kernels, where they were measured, or else with the step's, launches included.
    """
    found = list(_compared(rows, results)) if results else []
    if not found:
        return "Not measured: there is no `benchmarks/results/card.csv`, or it has none of these steps.\n"
    sizes, times = ("peak MiB", "simulated", "off"), ("step ms", "kernels ms", "simulated", "off")
    heads = ("step", "peer", *sizes, *times, "verdict")
    return tables.table(heads, found)


def _compared(rows: list[Row], results: Results) -> Iterator[tuple[str, ...]]:
    measured = {_step(panel): panel for panel in results.panels() if panel.rows[0].engine == "compiled"}
    for mode, mine in panels_of(rows).items():
        model, depth, sizes, card, way = mode.split(", ")
        panel = measured.get(", ".join((model, depth, sizes, way)))
        for point in panel.points() if panel else ():
            if is_planned(point.name) or (way == "scan" and peer(point.name).family == "remat"):
                # Plans follow the prices of the machine. A scan compiles its own steps on the card; in graphs
                # it is an op.
                continue
            peak, roofline = (value(mine, point.name, metric) for metric in ("peak", "roofline"))
            if peak != peak:  # this peer was not compiled
                continue
            computing = panel.value(point.name, "kernels") if panel else None
            busy = computing and computing.value
            errors = {"peak": peak / (point.memory / MIB) - 1}
            if card.upper() in results.context["hardware"].upper():
                errors["time"] = roofline / (busy or point.time) - 1
            met = all(abs(error) <= MOST[what] for what, error in errors.items())
            time = f"{errors['time']:+.1%}" if "time" in errors else "another card"
            yield (
                *(mode, tables.code(point.name), f"{point.memory / MIB:.0f}", f"{peak:.0f}"),
                *(f"{errors['peak']:+.1%}", f"{point.time:.1f}", f"{busy:.1f}" if busy else ""),
                *(f"{roofline:.1f}", time),
                "met" if met else "missed",
            )


def _step(panel: Panel) -> str:
    """The step of a panel as `benchmarks.graphs` calls it, the card aside."""
    first = panel.rows[0]
    return f"{first.model}, {first.depth} blocks, {first.batch} x {first.seq}, {first.mode}"
