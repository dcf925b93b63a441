"""Small tables of timings in the user's cache folder."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from remat._core import processor


def cache_directory() -> Path:
    """Where timings are kept: `REMAT_CACHE`, else `remat` in the user's cache directory."""
    chosen = os.environ.get("REMAT_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "remat"


def table_path(what: str, device: str) -> Path:
    """The file of one table: of this hardware, this number of threads, this torch."""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{processor()}-{platform.machine()}-{torch.get_num_threads()}"
    plain = "".join(c if c.isalnum() or c in "._" else "-" for c in name)
    return cache_directory() / f"{what}-{plain}-torch{torch.__version__}.json"


def read_table(path: Path) -> dict[str, Any]:
    """The table; an empty one where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_table(path: Path, table: dict[str, Any]) -> None:
    """Write a table aside and move it: a reader never sees half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(table))
        aside.replace(path)
    except OSError:
        # A disk that cannot be written costs only the next process its timings.
        pass
