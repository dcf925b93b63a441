"""A call stays on few files: the walks of `benchmarks.walk` are held to a number each."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.walk import LIMITS, WALKS
from tests.repo.house import ROOT

# In a process of its own: what other tests have met (torch.cond, captures, logs) adds to every walk.
_SCRIPT = """
import json
from benchmarks import walk
print(json.dumps({name: list(walk.walk(name).files) for name in walk.WALKS}))
"""


@pytest.fixture(scope="module")
def files() -> dict[str, list[str]]:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", WALKS)
def test_a_call_enters_few_files(files: dict[str, list[str]], name: str) -> None:
    assert 5 < len(files[name]) <= LIMITS[name], files[name]
