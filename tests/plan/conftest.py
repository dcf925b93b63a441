"""What is looked at for plans, counted."""

import logging
from typing import Any

import pytest

from tests.plan.inside import cache


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that are traced for a plan; no plan of an earlier test is known."""
    found: list[Any] = []
    record = cache.record
    monkeypatch.setattr(cache, "record", lambda fn, *a, **k: found.append(fn) or record(fn, *a, **k))
    for table in (cache._SEEN, cache._warned):
        table.clear()
    return found


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every look that is taken at a call, to see whether it is known."""
    taken: list[Any] = []
    before = cache.call_key
    monkeypatch.setattr(cache, "call_key", lambda *given: taken.append(given) or before(*given))
    return taken


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the library's logger warns of meanwhile."""
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("remat"), "warning", lambda text, *args: lines.append(text % args))
    return lines
