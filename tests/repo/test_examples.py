"""The examples run, print what they claim, and stand in the gallery."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(*command: str) -> str:
    # The checkout is found whether or not it is installed.
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kept(line: str) -> int:
    match = re.search(r"(\d+) bytes kept", line)
    assert match, line
    return int(match[1])


# Planned on shapes, and too large to run.
SIMULATED = ROOT / "examples" / "long_context.py"
PROCESSES = [path for path in EXAMPLES if path.stem.startswith("fsdp2")]
# The others one after another: a process of its own for each takes longer to start than to run.
ALONE = """
import runpy, sys
for path in sys.argv[1:]:
    print("example", path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", PROCESSES, ids=lambda path: path.stem)
def test_example_of_processes_keeps_less_with_remat(path: Path) -> None:
    check(path.stem, run(str(path)))


@pytest.mark.slow
def test_examples_keep_less_with_remat() -> None:
    paths = [str(path) for path in EXAMPLES if path not in (*PROCESSES, SIMULATED)]
    _, *printed = re.split(r"^example (.*)$", run("-c", ALONE, *paths), flags=re.MULTILINE)
    assert printed[::2] == paths
    for path, text in zip(paths, printed[1::2], strict=True):
        check(Path(path).stem, text.strip())


def check(name: str, printed: str) -> None:
    without, *versions = printed.splitlines()
    assert without.startswith("no remat") and versions, name
    versions = [version for version in versions if not version.startswith("frontier")]
    # The first version is full remat: of what no remat keeps, at most the blocks' inputs stay.
    assert kept(versions[0]) < kept(without) / 2, name
    assert all(kept(versions[0]) <= kept(version) < kept(without) for version in versions), name
    assert all("equal" in version for version in versions), name
    if name == "quickstart":
        check_quickstart(kept(without), *map(kept, versions))


def check_quickstart(without: int, nothing: int, matmuls: int) -> None:
    """Its counts are exact."""
    # One float32 of batch x width, and one of batch x hidden, in bytes.
    narrow, wide = 4 * 512 * 256, 4 * 512 * 1024
    assert nothing == 0
    # The product that GELU reads; nothing in the backward reads the second one.
    assert matmuls == wide
    # Normed input, its mean and reciprocal deviation, the product that GELU reads, GELU's result.
    assert without == narrow + 2 * 4 * 512 + 2 * wide


@pytest.mark.slow
def test_the_planned_step_fits_the_card_and_the_others_do_not() -> None:
    *plans, small = run(str(SIMULATED)).splitlines()
    assert ["does not fit" in plan for plan in plans] == [True, True, False]
    assert kept(plans[0]) > kept(plans[1]) > kept(plans[2])
    assert "gradients equal" in small


def test_readme_puts_the_two_commands_first() -> None:
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^\s*(make \w+)", text, re.MULTILINE)
    assert commands[:2] == ["make sweep", "make test"]
    assert text.index("pip install .") < text.index("make sweep") < text.index("```python")


def test_examples_stand_in_the_gallery_and_open_as_notebooks() -> None:
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    for path in EXAMPLES:
        assert f"(../examples/{path.name})" in gallery, path.name
        # The percent format of jupytext.
        assert re.search(r"^# %%", path.read_text(), re.MULTILINE), path.name
