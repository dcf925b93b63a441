"""What is installed, what `import remat` brings along, and which way imports run."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {
    "rich",
    "tyro",
    "scipy",
    "einops",
    "transformers",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
}


def python(code: str, cwd: Path = ROOT, *args: str) -> str:
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, folder: Path) -> Path:
    """The file that hatchling's PEP 517 hook `kind` makes."""
    name = python(f"from hatchling.build import {kind}; print({kind}({str(folder)!r}))").split()[-1]
    return folder / name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("build_wheel", tmp_path_factory.mktemp("wheel")))


@pytest.mark.slow
def test_wheel_installs_remat_alone_with_transforms_inside(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"remat"}
    assert {"remat/transforms/__init__.py", "remat/transforms/errors.py", "remat/py.typed"} <= set(names)
    sources = {f"remat/{path.relative_to(ROOT)}" for path in (ROOT / "transforms").rglob("*.py")}
    assert sources <= set(names)


def test_wheel_has_the_script_and_a_lower_bound_on_torch(wheel: zipfile.ZipFile) -> None:
    folder = next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    assert "remat = remat.cli.main:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    metadata = wheel.read(f"{folder}/METADATA").decode()
    needed = {line for line in metadata.splitlines() if "Requires-Dist" in line and "extra" not in line}
    assert needed == {"Requires-Dist: optree>=0.13", "Requires-Dist: torch>=2.11"}


@pytest.mark.slow
def test_wheel_runs_where_the_repository_is_not(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    where = python("import remat, remat.transforms as t; print(remat.__file__); print(t.__name__)", tmp_path)
    assert where.splitlines() == [str(tmp_path / "remat" / "__init__.py"), "remat.transforms"]


@pytest.mark.slow
def test_sdist_holds_transforms_as_files_not_as_a_link(tmp_path: Path) -> None:
    with tarfile.open(build("build_sdist", tmp_path)) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert members["remat/transforms/errors.py"].isfile()
    assert not any(member.issym() for member in members.values())


@pytest.mark.slow
def test_editable_install_finds_remat_and_no_top_level_transforms(tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    site.mkdir()
    elsewhere.mkdir()
    zipfile.ZipFile(build("build_editable", tmp_path)).extractall(site)
    found = python(
        f"import site; site.addsitedir({str(site)!r}); import importlib.util, remat.transforms\n"
        "print(remat.__file__, importlib.util.find_spec('transforms'))",
        elsewhere,
    )
    assert found.split() == [str(ROOT / "remat" / "__init__.py"), "None"]


STEP = "import remat; remat.remat(torch.sin)(torch.ones(2, requires_grad=True)).sum().backward()"
NAMED = {
    "import remat; remat.checkpoint_policy(budget=0.5)": "remat.plan",
    "from remat import fit": "remat.plan",
    "import remat; remat.plan": "remat.plan",
    "import remat; remat.explain": "remat._inspect.report",
}
ALL = "import remat, rich, torch._dynamo"
# Torch is imported once: each statement runs in a process that has nothing else.
FORKS = """
import json, os, sys
import torch
for statement in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        exec(statement)
        print(json.dumps([statement, sorted(sys.modules)]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, statement
"""


@functools.cache
def loaded() -> dict[str, set[str]]:
    """The modules that are there after each statement."""
    statements = json.dumps(["pass", "import remat", STEP, *NAMED, ALL])
    return {
        statement: set(names)
        for statement, names in map(json.loads, python(FORKS, ROOT, statements).splitlines())
    }


@pytest.mark.slow
def test_import_brings_nothing_heavy_beyond_torch() -> None:
    assert loaded()["import remat"] & HEAVY <= loaded()["pass"]
    assert loaded()[ALL] & HEAVY >= {"rich", "torch._dynamo"}


def test_the_face_shows_what_is_meant_and_no_more() -> None:
    import remat

    rooms = {"debug", "gpu", "interop", "losses", "plan", "policies", "presets", "schedules", "transforms"}
    assert dir(remat) == sorted([*remat.__all__, "__version__", "nn"])
    assert len(set(remat.__all__)) == len(remat.__all__)
    assert all(getattr(remat, name) is not None for name in dir(remat))
    assert {"remat", "scan_remat", "checkpoint_policy", "fit", "is_recomputing"} <= {*dir(remat)}
    # A submodule of the same name would take a function's place once it is imported.
    modules = {path.stem for path in (ROOT / "remat").iterdir()}
    assert modules & set(remat.__all__) == rooms
    with pytest.raises(AttributeError, match="no attribute 'save_nothin'"):
        remat.save_nothin  # noqa: B018


LATER = ("remat.plan", "remat.cli", "remat.debug", "remat.interop", "remat.gpu", "remat._inspect.report")
LATER += ("scipy", "networkx", "rich", "tyro", "jax", "transformers")


@pytest.mark.slow
def test_planner_and_reports_are_loaded_when_they_are_used() -> None:
    new = loaded()[STEP] - loaded()["pass"]
    assert not [name for name in new if any(inside(later, name) for later in LATER)]
    for statement, module in NAMED.items():
        assert module in loaded()[statement], statement


def test_the_version_is_that_of_the_distribution(wheel: zipfile.ZipFile) -> None:
    import remat

    folder = next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    assert f"\nVersion: {remat.__version__}\n" in wheel.read(f"{folder}/METADATA").decode()


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere; `.` stands for a relative import."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else str(node.module))
    return names


def inside(package: str, name: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", sorted((ROOT / "transforms").rglob("*.py")), ids=lambda path: path.stem)
def test_transforms_import_nothing_above_them(path: Path) -> None:
    above = {
        name for name in imported(path) if inside("remat", name) and not inside("remat.transforms", name)
    }
    assert not above and "." not in imported(path)


@pytest.mark.slow
def test_product_does_not_import_its_command_line_or_what_is_not_shipped() -> None:
    product = [path for path in (ROOT / "remat").rglob("*.py") if "cli" not in path.parts]
    for path in product:
        wrong = {n for n in imported(path) if inside("remat.cli", n) and path.name != "__main__.py"}
        assert not wrong, f"{path} imports {wrong}"
    for path in (ROOT / "remat").rglob("*.py"):
        wrong = {n for n in imported(path) if inside("benchmarks", n) or inside("tests", n) or n == "."}
        assert not wrong, f"{path} imports {wrong}"
