"""Prices by stopwatch: each op timed once on this device, remembered on disk."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from remat.plan.graph.traffic import is_view, traffic
from remat.transforms import BoundedCache, map_only
from remat.transforms.joint import Joint, Op, Ref

# An op is repeated until this much time has passed, so that small ones are not all clock.
_SECONDS = 2e-3
_REPEATS = 5
# Timings that are kept for one device, on disk too.
_MOST = 1 << 16


def cache_directory() -> Path:
    """Where timings are kept: `REMAT_CACHE`, else `remat` in the user's cache directory."""
    chosen = os.environ.get("REMAT_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "remat"


@dataclass(frozen=True)
class Measured:
    """Seconds of one call, the median of five on tensors of the op's own sizes.

    Some ops cannot be run by themselves: random state of their own, missing kernels, arguments that must hold
        certain values. They are priced by their traffic at the speed of a copy.

    Attributes:
        device: where to run; None means where each op's tensors are.
    """

    device: str | None = None
    unit: str = field(default="s", init=False, repr=False)

    def price(self, joint: Joint, op: Op) -> float:
        """Seconds of one call of `op`."""
        if is_view(joint, op):
            return 0.0
        key, device = self._key(joint, op)
        table = _table(device)
        if key not in table:
            table[key] = self._time(joint, op, device)
            _store(device, table)
        return table[key]

    def _key(self, joint: Joint, op: Op) -> tuple[str, str]:
        device = self.device or next((str(joint.values[v].device) for v in (*op.outputs, *op.reads)), "cpu")
        described = map_only(Ref, lambda r: _describe(joint, r), (op.args, op.kwargs))
        text = f"{op.name} {described}"
        return hashlib.sha256(text.encode()).hexdigest()[:24], device

    def _time(self, joint: Joint, op: Op, device: str) -> float:
        try:
            args, kwargs = map_only(Ref, lambda r: _tensor(joint, r, device), (op.args, op.kwargs))
            return seconds(lambda: op.target(*args, **kwargs), device)
        except Exception:
            # Whatever keeps one op from running alone, its price is no reason to fail a plan.
            return traffic(joint, op) / _copy_speed(device)


def seconds(call: Callable[[], Any], device: str) -> float:
    """Median seconds of `call`, after one warm-up, without gradients."""
    wait = functools.partial(torch.cuda.synchronize, device) if device.startswith("cuda") else lambda: None
    with torch.no_grad():
        call()
        wait()
        times = []
        for _ in range(_REPEATS):
            count, start = 0, time.perf_counter()
            while time.perf_counter() - start < _SECONDS / _REPEATS:
                call()
                count += 1
            wait()
            times.append((time.perf_counter() - start) / count)
    return statistics.median(times)


def _describe(joint: Joint, ref: Ref) -> str:
    value = joint.values[ref.id]
    return f"{value.dtype}{value.shape}{value.stride}"


def _tensor(joint: Joint, ref: Ref, device: str) -> torch.Tensor:
    value = joint.values[ref.id]
    made = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    # Zeros are valid indices and fast to make, but too kind to some kernels: floats get ordinary numbers.
    return made.normal_() if value.dtype.is_floating_point and 0 not in value.stride else made.zero_()


@functools.lru_cache(maxsize=8)
def _copy_speed(device: str) -> float:
    """Bytes a second of a large copy, reads and writes counted."""
    source = torch.zeros(1 << 24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), device)


def _path(device: str) -> Path:
    name = (
        torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu{torch.get_num_threads()}"
    )
    return cache_directory() / f"ops-{name.replace(' ', '-')}-torch{torch.__version__}.json"


@functools.lru_cache(maxsize=8)
def _table(device: str) -> BoundedCache[str, float]:
    try:
        return BoundedCache(_MOST, json.loads(_path(device).read_text()).items())
    except (OSError, ValueError, AttributeError):
        return BoundedCache(_MOST)


def _store(device: str, table: dict[str, float]) -> None:
    path = _path(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and moved: a reader never sees half a file.
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(table))
        aside.replace(path)
    except OSError:
        # A disk that cannot be written costs only the next process its timings.
        pass
