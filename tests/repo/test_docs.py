"""The page docs/looking.md prints what its code prints."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "looking.md").read_text()
BLOCKS = re.findall(r"```(python|text)\n(.*?)```", PAGE, re.DOTALL)
LINES = {"transformers": "5.23.0", "torch": "2.13.0"}


def printed(code: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_hugging_face_layer() -> None:
    """Line numbers and ops are those of one version; others are not compared."""
    for package, version in LINES.items():
        pytest.importorskip(package)
        if importlib.metadata.version(package).partition("+")[0] != version:
            pytest.skip(f"the page was printed with {package} {version}")
    (_, code), (_, explained), (_, compared) = BLOCKS[:3]
    call = re.search(r"`(print\(compare\(.*?\))`", PAGE)
    assert call
    code = code.replace("import explain", "import compare, explain")
    assert printed(f"{code}{call[1]}\n") == explained + compared


def test_intermediates() -> None:
    (_, code), (_, expected) = BLOCKS[3:]
    assert printed(code) == expected
