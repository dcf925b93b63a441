"""Chromium without a window, where the machine has one."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
# No window, no GPU, and nothing that it would ask of a network on its own.
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def find() -> str | None:
    """Where the browser is, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def run(page: Path | str, *options: str) -> str:
    """Open a file or an address in a browser that knows nothing yet; returns what it prints."""
    browser = find()
    assert browser is not None
    with tempfile.TemporaryDirectory() as profile:
        address = page if isinstance(page, str) else page.resolve().as_uri()
        command = [browser, *OPTIONS, f"--user-data-dir={profile}", *options, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def with_script(page: Path, script: str) -> Path:
    """A copy of the page that runs a script when all of its own have run."""
    copy = page.with_name(f"{page.stem}-driven.html")
    text = page.read_text(encoding="utf-8")
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return copy
