"""The committed figures of `benchmarks.published`: what planning published models takes."""

from benchmarks.common.records import RESULTS, by_mode
from benchmarks.published import STEPS, row
from tests.inside import parse_bytes

DOCS = RESULTS.parents[1] / "docs" / "measured" / "planner.md"


def test_planning_published_models_takes_under_a_gib():
    """And the page has the rows of the file."""
    found = by_mode("published")
    assert list(found) == list(STEPS)
    page = DOCS.read_text()
    for step, values in found.items():
        assert row(step, values) in page, step
        assert values["planner's memory"] < 1, step
        words = STEPS[step].split()
        most = parse_bytes(words[words.index("--peak") + 1]) / 2**30
        assert values["peak"] <= most < values["peak without remat"], step
