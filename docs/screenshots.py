"""Takes the pictures of the site and of the report's page: `make screenshots`. It needs Chromium."""

from __future__ import annotations

import contextlib
import functools
import http.server
import itertools
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from remat import explain, remat, save_every_nth, save_matmuls
from remat.cli.models import Sizes, batches, build
from tests.tools import chromium

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
# What a reader does before a picture is taken.
MOVE_SLIDER = """
const slider = document.querySelector("input[type=range]");
slider.value = 1;
slider.dispatchEvent(new Event("input"));
"""
CLICK_OP = """
const canvas = [...document.querySelectorAll("canvas")].pop();
const box = canvas.getBoundingClientRect();
canvas.dispatchEvent(new MouseEvent("click", { clientX: box.left + 0.7 * box.width }));
"""


def save_report(path: Path) -> None:
    """The page of a small transformer, with its frontier."""
    sizes = Sizes(depth=6, width=128, heads=4, seq=128)
    model = build("gpt", sizes, torch.float32, torch.device("cpu"))
    params, numbers = model.leaves(model.params), itertools.cycle(range(sizes.depth))

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        def wrap(block: Any) -> Any:
            return remat(block, policy=save_every_nth(2, save_matmuls), name=f"layer {next(numbers)}")

        return model.loss(params, tokens, wrap)

    explain(loss, next(batches(4, sizes.seq)), policies=True).save(path)


def shoot(page: Path | str, name: str, width: int, height: int) -> None:
    """One picture, in as few colours as it needs: pages with pictures stay small."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        # Time that passes at once: what the page fades in is there.
        chromium.run(
            page, f"--screenshot={shot}", f"--window-size={width},{height}", "--virtual-time-budget=3000"
        )
        picture = Image.open(shot).convert("RGB").quantize(128)
    picture.save(FIGURES / name, optimize=True)
    print(f"{name}: {(FIGURES / name).stat().st_size >> 10} KiB")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The site at an address of this machine: its search works at no other."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def main() -> int:
    if chromium.find() is None:
        print(f"screenshots need a browser: install one of {', '.join(chromium.NAMES)}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        report, site = Path(folder) / "report.html", Path(folder) / "site"
        save_report(report)
        shoot(chromium.with_script(report, MOVE_SLIDER), "frontier.png", 1200, 492)
        shoot(chromium.with_script(report, CLICK_OP), "cockpit.png", 1200, 1290)
        build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
        subprocess.run(build, cwd=ROOT, check=True)
        with served(site) as address:
            shoot(f"{address}/index.html", "site_front.png", 1280, 800)
            shoot(f"{address}/api/remat.scan_remat/index.html", "site_api.png", 1280, 800)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
