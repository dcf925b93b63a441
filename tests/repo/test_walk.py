"""A call stays on few files: the walks of `benchmarks.walk` are held to a number each."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.walk import LIMITS, WALKS
from tests.repo.house import ROOT

# In a process of its own: what other tests have met (torch.cond, captures, logs) adds to every walk.
_SCRIPT = """
import json
from benchmarks import walk
print(json.dumps({name: list(walk.walk(name).files) for name in walk.WALKS}))
"""


def test_calls_enter_few_files() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    files: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    assert files.keys() == WALKS.keys()
    for name, entered in files.items():
        assert 5 < len(entered) <= LIMITS[name], (name, entered)
