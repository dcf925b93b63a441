"""Scans drawn at random (`python -m tests.fuzz.scans` draws more of them)."""

from __future__ import annotations

import pytest

from tests.fuzz.scans import COMPILED, EAGER, differ

TOGETHER = 50


def same(seeds: range, ways: tuple[str, ...]) -> None:
    counts, found = differ(seeds, ways)
    assert found == [] and counts["same"] == len(seeds)


@pytest.mark.parametrize("first", range(0, 200, TOGETHER))
def test_scans_are_as_the_loop(first: int) -> None:
    same(range(first, first + TOGETHER), EAGER)


def test_compiled_scans_are_as_the_loop() -> None:
    same(range(100_000, 100_010), COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 10 * TOGETHER))
def test_more_scans_are_as_the_loop(first: int) -> None:
    same(range(first, first + 10 * TOGETHER), EAGER)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(101_000, 101_100, TOGETHER))
def test_more_compiled_scans_are_as_the_loop(first: int) -> None:
    same(range(first, first + TOGETHER), COMPILED)
