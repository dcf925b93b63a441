"""The committed figures of `benchmarks.published`: what planning published models takes."""

import csv

from benchmarks.common.records import RESULTS
from benchmarks.published import STEPS, row

DOCS = RESULTS.parents[1] / "docs" / "without-gpu.md"
# The command's own claim: steps that fit a card of so many bytes, at most.
CARDS = {"80GB": 80e9 / 2**30, "40GB": 40e9 / 2**30}


def test_planning_published_models_takes_under_a_gib():
    """And the page has the rows of the file."""
    found: dict[str, dict[str, float]] = {}
    with (RESULTS / "published.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            found.setdefault(record["mode"], {})[record["metric"]] = float(record["value"])
    assert list(found) == list(STEPS)
    page = DOCS.read_text()
    for step, values in found.items():
        assert row(step, values) in page, step
        assert values["planner's memory"] < 1, step
        most = next(size for card, size in CARDS.items() if card in STEPS[step].split())
        assert values["peak"] <= most < values["peak without remat"], step
