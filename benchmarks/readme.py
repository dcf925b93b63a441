"""Writes README's table from `results/sweep.csv`, which is a copy of what `python -m remat sweep` left.

python -m remat sweep --out out && cp out/sweep.csv benchmarks/results/ && python -m benchmarks.readme
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from benchmarks.records import RESULTS

README = Path(__file__).parent.parent / "README.md"
BETWEEN = re.compile(r"(<!-- sweep: [^\n]*-->\n).*?(<!-- sweep ends -->)", re.DOTALL)
MIB = 1 << 20


def table(path: Path = RESULTS / "sweep.csv") -> str:
    """The hardware sentence, then one line a policy."""
    with path.open() as file:
        records = list(csv.DictReader(file))
    head = "| policy | kept MiB | peak MiB | ops again | GFLOP again | step ms (p20-p80) | gradient differs |"
    rule = "|---|---:|---:|---:|---:|---:|---:|"
    return "\n".join([sentence(records[0]), "", head, rule, *map(line, records)]) + "\n"


def sentence(record: dict[str, str]) -> str:
    return (
        "{depth} {model} blocks, width {width}, {heads} heads, batch {batch} x {seq} bytes, {dtype}, "
        "mode {mode}, {threads} threads of {hardware}, torch {torch}:".format(**record)
    )


def line(record: dict[str, str]) -> str:
    # A bar ends a table's cell: the union of two policies is written with it escaped.
    name = "`" + record["policy"].replace("|", "\\|") + "`"
    if record["error"]:
        return f"| {name} | {record['error']} | | | | | |"
    kept, peak = (int(record[key]) / MIB for key in ("kept_bytes", "peak_bytes"))
    p20, p50, p80 = (float(record[f"step_ms_{key}"]) for key in ("p20", "p50", "p80"))
    ops, flops = record["ops_recomputed"], int(record["flops_recomputed"]) / 1e9
    apart = float(record["gradient_difference"])
    memory, time = f"{kept:.1f} | {peak:.1f}", f"{p50:.0f} ({p20:.0f}-{p80:.0f})"
    return f"| {name} | {memory} | {ops} | {flops:.2f} | {time} | {apart:.1e} |"


def filled(text: str, table: str) -> str:
    """`text` with `table` between the two markers."""
    return BETWEEN.sub(lambda match: f"{match[1]}\n{table}\n{match[2]}", text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text(), table()))
