"""What a release needs: one version, one address, links for PyPI, a checkout without symbolic links."""

from __future__ import annotations

import email.message
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import remat
from tests.repo.test_package import build

ROOT = Path(__file__).parents[2]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> email.message.Message:
    archive = zipfile.ZipFile(build("build_wheel", tmp_path_factory.mktemp("wheel")))
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(archive.read(name))


def test_readme_has_no_relative_link_on_pypi(metadata: email.message.Message) -> None:
    text = metadata.get_payload()
    targets = re.findall(r"\]\(([^)]+)\)", str(text)) + re.findall(r'\bsrc(?:set)?="([^"]+)"', str(text))
    assert len(targets) > 10 and any(target.endswith("-dark.png") for target in targets)
    assert not [target for target in targets if not target.startswith(("https://", "#"))]
    assert f"{URLS['Repository']}/raw/v{remat.__version__}/docs/figures/" in str(text)


def test_links_of_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        if not target.startswith(("https:", "#")):
            assert (ROOT / target.partition("#")[0]).exists(), target


def test_urls_are_in_the_metadata(metadata: email.message.Message) -> None:
    assert metadata.get_all("Project-URL") == [f"{name}, {url}" for name, url in URLS.items()]


def test_one_address_everywhere() -> None:
    """A new home of the project is written in pyproject.toml, and this test names the other places."""
    ours = re.compile(r"https://(?:github\.com/[\w-]+|[\w-]+\.github\.io)/remat\b")
    known = {URLS["Repository"], URLS["Homepage"]}
    files = [ROOT / "CITATION.cff", ROOT / "mkdocs.yml", ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for path in [*files, *(ROOT / ".github").rglob("*.yml"), *(ROOT / "docs").rglob("*.md")]:
        assert set(ours.findall(path.read_text())) <= known, path


def test_the_version_is_written_once() -> None:
    for name in ("pyproject.toml", "CITATION.cff", "mkdocs.yml", "README.md"):
        assert f'"{remat.__version__}"' not in (ROOT / name).read_text(), name
    assert f"\n## {remat.__version__} - " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_a_checkout_without_symbolic_links_works() -> None:
    subprocess.run([ROOT / ".ci" / "without-links", sys.executable], check=True, timeout=300)
