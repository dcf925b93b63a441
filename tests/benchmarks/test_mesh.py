"""The committed figures of `benchmarks.mesh`: what planning large jobs takes."""

import csv

from benchmarks.common.records import RESULTS
from benchmarks.mesh import jobs, row

DOCS = RESULTS.parents[1] / "docs" / "mesh-plans.md"


def test_planning_large_jobs_takes_under_a_minute_and_two_gib():
    """And the page has the rows of the file."""
    found: dict[str, dict[str, float]] = {}
    with (RESULTS / "mesh.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            found.setdefault(record["mode"], {})[record["metric"]] = float(record["value"])
    assert list(found) == [name for name, *_ in jobs()]
    page = DOCS.read_text()
    for name, values in found.items():
        assert values["planning"] < 60 and values["planner's memory"] < 2, name
        assert values["a rank's peak"] <= 79 and row(name, values) in page, name
