"""The site builds, no page of it is heavy, and a release puts its version beside the others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest

import remat

yaml = pytest.importorskip("yaml")
pytest.importorskip("mkdocs")
pytest.importorskip("material")

ROOT = Path(__file__).parents[2]
LIMIT = 1_000_000
# Fetched by the theme's script: what the search works with.
ALWAYS = ("search/search_index.json", "assets/javascripts/workers/search.*.min.js")
# What a browser loads of its own accord: pictures, styles, scripts; not links.
LOADED = re.compile(r"""<(?:img|script|link rel="(?:stylesheet|icon)")[^>]*?(?:src|href)="?([^"\s>]+)""")


def command(*words: str, cwd: Path = ROOT, **extra: str) -> str:
    # mike starts `mkdocs` by name.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PATH": path} | extra
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder))
    return folder


def weight(page: Path, site: Path) -> int:
    """Bytes that a first visit of the page loads, uncompressed."""
    text = page.read_text()
    found = {page, *(path for pattern in ALWAYS for path in site.glob(pattern))}
    for target in LOADED.findall(text):
        if not target.startswith(("http", "data:", "//")):
            base = site if target.startswith("/") else page.parent
            found.add((base / unquote(target.partition("?")[0].partition("#")[0]).lstrip("/")).resolve())
    return sum(path.stat().st_size for path in found if path.is_file())


@pytest.mark.slow
def test_every_page_is_under_a_megabyte(site: Path) -> None:
    # The page for a wrong address says where things are from the root of the server.
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    weights = {str(page.relative_to(site)): weight(page, site) for page in pages}
    assert len(weights) > 30
    assert {page: size for page, size in weights.items() if size > LIMIT} == {}
    # Styles, scripts and the index alone are most of it: the weights count them.
    assert min(weights.values()) > LIMIT / 4


@pytest.mark.slow
def test_the_site_has_search_dark_mode_and_its_version(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert f"remat {remat.__version__}" in text
    assert 'data-md-component="search"' in text and 'data-md-color-scheme="slate"' in text
    assert '"provider": "mike"' in text or '"provider":"mike"' in text
    assert "remat.remat" in (site / "search" / "search_index.json").read_text()


@pytest.mark.slow
def test_bars_in_tables_have_no_backslash(site: Path) -> None:
    text = (site / "measured" / "benchmarks" / "index.html").read_text()
    assert "<td><code>save_matmuls | save_attention</code></td>" in text and r"\|" not in text


@pytest.mark.slow
def test_every_public_name_has_a_page_of_its_own(site: Path) -> None:
    listed = [
        path
        for page in (ROOT / "docs" / "api").glob("*.md")
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    pages = [page.read_text() for page in (site / "api").glob("*/index.html")]
    # The page's own heading is the name: a link from elsewhere leads to it.
    headings = Counter(found for text in pages for found in re.findall(r'<h1 id="?([\w.]+)', text))
    assert len(listed) > 70
    assert {path: headings[path] for path in listed if headings[path] != 1} == {}


@pytest.mark.slow
def test_a_version_is_put_beside_the_others(tmp_path: Path) -> None:
    pytest.importorskip("mike")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("docs", "remat", "transforms"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", copy)
    git = ["git", "-C", str(copy), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    who = {f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    run = "from mike.driver import main; main()"
    for version in ("0.1.0", remat.__version__):
        command("-c", run, "deploy", "--update-aliases", version, "latest", cwd=copy, **who)
    show = lambda path: subprocess.check_output([*git, "show", f"gh-pages:{path}"], text=True)  # noqa: E731
    versions = {entry["version"]: entry["aliases"] for entry in json.loads(show("versions.json"))}
    assert versions == {remat.__version__: ["latest"], "0.1.0": []}
    assert f"/blob/v{remat.__version__}/examples/" in show(f"{remat.__version__}/gallery/index.html")


def test_versions_are_configured_and_published() -> None:
    # The one tag that is not plain YAML names a Python function.
    text = (ROOT / "mkdocs.yml").read_text().replace("!!python/name:", "")
    config = yaml.safe_load(text)
    assert config["extra"]["version"] == {"provider": "mike", "default": "latest"}
    assert config["site_url"] and "search" in config["plugins"]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())["jobs"]
    steps = {name: [step.get("run", step.get("uses")) for step in job["steps"]] for name, job in jobs.items()}
    assert "make docs-version ARGS=--push" in steps["site"]
    assert jobs["site"]["permissions"] == {"contents": "write"}
    assert {"make release", "make docs"} <= set(steps["build"])
    # Trusted publishing: a token of the run, and no password.
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}
    assert steps["pypi"][-1].startswith("pypa/gh-action-pypi-publish@")
    assert not any("with" in step and "password" in step["with"] for step in jobs["pypi"]["steps"])
