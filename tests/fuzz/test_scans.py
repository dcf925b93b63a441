"""Scans drawn at random (`python -m tests.fuzz.scans` draws more of them)."""

from __future__ import annotations

import pytest

from tests.fuzz.scans import COMPILED, EAGER, differ

TOGETHER = 50


def same(seeds: range, ways: tuple[str, ...], backend: str = "aot_eager") -> None:
    counts, found = differ(seeds, ways, backend)
    assert found == [] and counts["same"] + counts["invalid"] == len(seeds)
    assert counts["same"] > 0.9 * len(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, TOGETHER))
def test_scans_are_as_the_loop(first: int) -> None:
    same(range(first, first + TOGETHER), EAGER)


@pytest.mark.slow
def test_compiled_scans_are_as_the_loop() -> None:
    same(range(100_000, 100_010), COMPILED)


@pytest.mark.slow
def test_scans_of_inductor_are_as_the_loop() -> None:
    same(range(102_000, 102_001), COMPILED, "inductor")
