"""The committed figures of `benchmarks.mesh`: what planning large jobs takes."""

from benchmarks.common.records import RESULTS, by_mode
from benchmarks.mesh import jobs, row

DOCS = RESULTS.parents[1] / "docs" / "measured" / "mesh-plans.md"


def test_planning_large_jobs_takes_under_a_minute_and_two_gib():
    """And the page has the rows of the file."""
    found = by_mode("mesh")
    assert list(found) == [name for name, *_ in jobs()]
    page = DOCS.read_text()
    for name, values in found.items():
        assert values["planning"] < 60 and values["planner's memory"] < 2, name
        assert values["a rank's peak"] <= 79 and row(name, values) in page, name
