"""Takes the pictures of the site and of the report's page: `make screenshots`. It needs Chromium.

docs/figures gets the page of a report, light and dark, for a desk and for a phone, and bars of each example
of the gallery. docs/figures/screens gets the site's front page, gallery and charts in the same four ways.

    python -m docs.screenshots report gallery chart site     # these parts; all without a name
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import itertools
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from remat import checkpoint_policy, explain, remat, save_every_nth, save_matmuls, save_nothing
from remat._core import bars, format_bytes
from remat.cli.models import Sizes, batches, build
from tests.tools import chromium

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
SCREENS = FIGURES / "screens"
# Width and height of a desk's window and of a phone's, and the colours of a page.
WINDOWS = {1280: 800, 390: 844}
SCHEMES = {"dark": 0, "light": 1}


def save_report(path: Path) -> None:
    """The page of a small transformer, with its frontier."""
    sizes = Sizes(depth=6, width=128, heads=4, seq=128)
    model = build("gpt", sizes, torch.float32, torch.device("cpu"))
    params, numbers = model.leaves(model.params), itertools.cycle(range(sizes.depth))

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        def wrap(block: Any) -> Any:
            return remat(block, policy=save_every_nth(2, save_matmuls), name=f"layer {next(numbers)}")

        return model.loss(params, tokens, wrap)

    policies = [save_nothing, save_matmuls, *[checkpoint_policy(budget=b) for b in (0.2, 0.4, 0.6)]]
    explain(loss, next(batches(4, sizes.seq)), policies=policies).save(path)


def shoot(page: Path | str, place: Path, heights: dict[int, int]) -> None:
    """A page in both widths and both schemes, in few colours: pages with pictures stay small."""
    place.parent.mkdir(exist_ok=True)
    for (width, height), (scheme, number) in itertools.product(heights.items(), SCHEMES.items()):
        file = place.with_name(f"{place.name}-{width}-{scheme}.png")
        with tempfile.TemporaryDirectory() as folder:
            shot = Path(folder) / "shot.png"
            # Time that passes at once: what the page fades in is there.
            options = f"--window-size={width},{height}", f"--blink-settings=preferredColorScheme={number}"
            chromium.run(page, f"--screenshot={shot}", *options, "--virtual-time-budget=3000")
            picture = Image.open(shot).convert("RGB").quantize(64)
        picture.save(file, optimize=True)
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size >> 10} KiB")


def report(folder: Path) -> None:
    """The report's page."""
    save_report(folder / "report.html")
    shoot(folder / "report.html", FIGURES / "report", {1280: 1340, 390: 1250})


def gallery(folder: Path) -> None:
    """A bar for each line of an example that says what is kept."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        said = subprocess.run(
            [sys.executable, path], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        found = re.findall(r"^(\S.*?)\s+(\d+) bytes kept", said.stdout, re.MULTILINE)
        rows = [
            (name, int(size), format_bytes(int(size)), 0 if i else 4) for i, (name, size) in enumerate(found)
        ]
        assert rows, f"{path.name} does not say what it keeps"
        (FIGURES / f"gallery_{path.stem}.svg").write_text(bars("Kept for the backward", rows))
        print(f"gallery_{path.stem}.svg")


def chart(folder: Path) -> None:
    """The chart of the front page, as wide as the window."""
    shoot(FIGURES / "front.svg", SCREENS / "chart", {1280: 960, 390: 292})


def site(folder: Path) -> None:
    """The front page and the gallery."""
    make = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder / "site"),
    ]
    subprocess.run(make, cwd=ROOT, check=True)
    with served(folder / "site") as address:
        shoot(f"{address}/index.html", SCREENS / "front", {1280: 1900, 390: 1900})
        shoot(f"{address}/gallery/index.html", SCREENS / "gallery", WINDOWS)


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
    parts = {"report": report, "gallery": gallery, "chart": chart, "site": site}
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or parts:
            parts[name](Path(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
