"""A call stays on few files: the walks of `benchmarks.walk` are held to a number each."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.walk import CALLS, LIMITS, WALKS
from tests.repo.house import ROOT

# In a process of its own: what other tests have met (torch.cond, captures, logs) adds to every walk.
_SCRIPT = """
import json
from benchmarks import walk
taken = {name: walk.walk(name) for name in walk.WALKS}
print(json.dumps({name: (list(walked.files), walked.calls) for name, walked in taken.items()}))
"""


def test_calls_enter_few_files() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    walks: dict[str, tuple[list[str], int]] = json.loads(done.stdout.splitlines()[-1])
    assert walks.keys() == WALKS.keys()
    for name, (entered, calls) in walks.items():
        assert 5 < len(entered) <= LIMITS[name], (name, entered)
        assert calls <= CALLS.get(name, calls), (name, calls)
