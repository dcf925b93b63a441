"""The front check: which planned points a ready policy beats, and that the suite fails for them."""

from __future__ import annotations

import csv
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from benchmarks.common.records import RESULTS
from benchmarks.plans import beaten, check, planned
from benchmarks.suite.cases import Case, Measured
from benchmarks.suite.loaded import Results
from benchmarks.suite.panel import Panel as Run

CASE = Case("panel", "vit-l", sizes=(("depth", 2),))
CONTEXT = {"torch": "2.13.0", "python": "3.11", "commit": "abc"}


def written(path: Path, points: dict[str, tuple[str, float, float]]) -> Path:
    """A suite's CSV of one panel: peer -> family, peak bytes, milliseconds."""
    rows = []
    for name, (family, peak, step) in points.items():
        row = replace(Measured.of(CASE), peer=name, family=family)
        rows += [row.with_value("peak", "bytes", peak), row.with_spread("step", "ms", (step, step, step))]
    with path.open("w", newline="") as file:
        lines = csv.DictWriter(file, [*CONTEXT, *(field.name for field in fields(Measured))])
        lines.writeheader()
        lines.writerows(CONTEXT | asdict(row) for row in rows)
    return path


POINTS = {
    "none": ("none", 100.0, 10.0),
    "save_matmuls": ("remat", 50.0, 11.0),
    "torch SAC": ("torch", 10.0, 1.0),
    "budget 0.5": ("remat", 50.0, 11.2),
    "budget 0.3": ("remat", 40.0, 20.0),
}


def test_a_point_within_two_percent_or_with_less_memory_is_not_beaten(tmp_path: Path) -> None:
    path = written(tmp_path / "plans.csv", POINTS)
    results = Results.load(path)
    assert results is not None
    (panel,) = results.panels()
    assert [point.name for point in planned(panel)] == ["budget 0.5", "budget 0.3"]
    assert beaten(panel) == [] and check(path) == 0


def test_a_beaten_point_fails_the_check_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "plans.csv", POINTS | {"budget 0.7": ("remat", 70.0, 11.3)})
    assert check(path) == 1
    said = capsys.readouterr().out
    assert "budget 0.7 (keeps 0.0, peak 0.0 MiB, 11.3 ms) is beaten by save_matmuls" in said
    assert "front: 1 of 3 planned points" in said


def test_a_budget_bounds_what_is_kept_and_rounds_are_compared_one_by_one(tmp_path: Path) -> None:
    path = written(tmp_path / "plans.csv", POINTS | {"budget 0.7": ("remat", 70.0, 11.3)})
    results = Results.load(path)
    assert results is not None
    (panel,) = results.panels()
    row = replace(Measured.of(CASE), peer="budget 0.7", family="remat")
    rival = replace(row, peer="save_matmuls")
    kept = [row.with_value("kept", "bytes", 20.0), rival.with_value("kept", "bytes", 30.0)]
    more = replace(panel, rows=[*panel.rows, *kept])
    assert "budget 0.7" not in [point.name for point, _ in beaten(more)]
    assert [point.name for point, _ in beaten(more, at_peak=True)] == ["budget 0.7"]
    ratio = row.with_value("step over save_matmuls", "ratio", 1.01)
    assert beaten(replace(panel, rows=[*panel.rows, ratio]), at_peak=True) == []


def test_the_committed_run_is_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(RESULTS / "plans.csv") == 0
    page = (RESULTS.parents[1] / "docs" / "measured" / "benchmarks.md").read_text()
    said = [line for line in capsys.readouterr().out.splitlines() if "is beaten at its peak by" not in line]
    assert said and "\n".join(said) in page


def test_nothing_to_look_at_is_no_success(tmp_path: Path) -> None:
    assert check(tmp_path / "plans.csv") == 1


@pytest.mark.slow
def test_planned_peers_stand_over_others_of_the_same_round_beside_their_promises() -> None:
    sizes = (("depth", 2), ("width", 32), ("heads", 2), ("seq", 16), ("batch", 2))
    peers = ("none", "save_matmuls", "budget 0.5", "fit 0.5")
    case = Case("panel", "gpt2-medium", peers, sizes=sizes, clock="process", rounds=2)
    rows = {(row.peer, row.metric): row for row in Run.of(case).run()}
    assert not [row.error for row in rows.values() if row.error]
    for peer in ("budget 0.5", "fit 0.5"):
        # (A plan counts a scalar of the loss, four bytes, that the region does not keep.)
        over = (rows[peer, "predicted kept"].value or 0) - (rows[peer, "kept"].value or 0)
        assert 0 <= over <= 4
        assert rows[peer, "step over save_matmuls"].unit == rows[peer, "step over none"].unit == "ratio"
        assert (rows[peer, "predicted step"].value or 0) > (rows["none", "predicted step"].value or 0) > 0
    keys = ("fit 0.5", "predicted peak"), ("fit 0.5", "peak"), ("none", "peak")
    told, peak, plain = (rows[key].value or 0.0 for key in keys)
    assert abs(told - peak) <= 8 and peak < plain
