"""Speeds of the machine at hand: probed once, in about a second, and remembered on disk.

A speed is a curve: work -> work per second, as small ops attain less than large ones. Work is FLOPs of
matmuls, convolutions and attention, and bytes read and written of the others.

| kind | stands for |
|---|---|
| `matmul`, `convolution`, `attention`, `causal attention` | ops with FLOPs |
| `copy` | sums, products, copies: ops as fast as memory |
| `clone` | a copy into another order of dimensions |
| `math` | exponentials and the like: `gelu`, `silu`, `exp`, softmax |
| `tanh` | what takes several times as long: `tanh`, `softplus`, powers, `gelu` by tanh |
| `norm` | layer norm and other ops that read their input twice |
| `random` | draws |
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from remat.plan.graph.disk import read_table, table_path, write_table
from remat.plan.graph.stopwatch import alone, best_seconds

# (work, work per second), the smallest work first.
Curve: TypeAlias = "tuple[tuple[float, float], ...]"

HEAVY = ("matmul", "convolution", "attention", "causal attention")
LIGHT = ("copy", "clone", "math", "tanh", "norm", "random")
# No probe is begun that would take longer, by the speed of the one before.
_LONG = 0.05
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Speeds:
    """What one device attains. A curve is probed when it is first asked for."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.path = table_path("speeds", device)
        self.table: dict[str, Any] = read_table(self.path)

    def call(self) -> float:
        """Seconds of an op on next to nothing: what every op of eager code takes at least."""
        return float(self._found("call", self._time_call))

    def curve(self, kind: str, dtype: torch.dtype) -> Curve:
        """Speeds by work; a dtype that is not probed has those of float32."""
        if dtype not in _DTYPES:
            dtype = torch.float32
        name = f"{kind} {str(dtype).removeprefix('torch.')}"
        return tuple((w, rate) for w, rate in self._found(name, lambda: self._time_curve(kind, dtype)))

    def seconds(self, kind: str, dtype: torch.dtype, work: float) -> float:
        """What so much work takes, the call itself aside."""
        return work / rate_at(self.curve(kind, dtype), work) if work > 0 else 0.0

    def attained(self, dtype: torch.dtype) -> dict[str, float]:
        """The speed of each kind at the largest work that was probed, for people."""
        return {kind: self.curve(kind, dtype)[-1][1] for kind in (*HEAVY, *LIGHT)}

    def _found(self, name: str, probe: Callable[[], Any]) -> Any:
        if name not in self.table:
            with alone(self.device):
                made = probe()
            # Another process may have probed meanwhile: all are to price alike, so the first one counts.
            self.table = {name: made} | self.table | read_table(self.path)
            write_table(self.path, self.table)
        return self.table[name]

    def _time_call(self) -> float:
        tiny = torch.zeros(8, device=self.device)
        return best_seconds(lambda: torch.add(tiny, tiny), self.device)

    def _time_curve(self, kind: str, dtype: torch.dtype) -> list[list[float]]:
        call, curve = self.call(), []
        for work, run in probes(kind, dtype, self.device):
            if curve and work / curve[-1][1] > _LONG:
                break
            try:
                taken = best_seconds(run, self.device)
            except RuntimeError:
                # No kernel for this dtype: it is priced as float32 is.
                break
            curve.append([work, work / max(taken - call, 0.1 * taken)])
        if not curve:
            return [list(point) for point in self.curve(kind, torch.float32)]
        return curve


@functools.lru_cache(maxsize=16)
def _speeds(device: str, threads: int, folder: str | None) -> Speeds:
    return Speeds(device)


def speeds_of(device: str) -> Speeds:
    """The speeds of "cpu" or of a CUDA device of this machine, with so many threads as there are now."""
    return _speeds(device, torch.get_num_threads(), os.environ.get("REMAT_CACHE"))


def rate_at(curve: Curve, work: float) -> float:
    """The speed at so much work: between two points as a power of the work, beyond them as at the last."""
    if work <= curve[0][0]:
        return curve[0][1]
    for (low, slow), (high, fast) in zip(curve, curve[1:], strict=False):
        if work <= high:
            share = math.log(work / low) / math.log(high / low)
            return slow * (fast / slow) ** share
    return curve[-1][1]


def probes(kind: str, dtype: torch.dtype, device: str) -> Iterator[tuple[float, Callable[[], Any]]]:
    """Work and what does it, the smallest first."""
    large = device.startswith("cuda")
    ones = functools.partial(torch.ones, dtype=dtype, device=device)
    if kind in HEAVY:
        yield from _heavy(kind, large, ones)
        return
    for count in (2**14, 2**18, 2**22) if not large else (2**18, 2**22, 2**26):
        x = ones(count // 256, 256)
        y = ones(count // 1024, 16, 64).transpose(0, 1)
        run, tensors = {
            "copy": (lambda x=x: x + x, 3),
            "clone": (lambda y=y: y.clone(memory_format=torch.contiguous_format), 2),
            "math": (lambda x=x: torch.nn.functional.gelu(x), 2),
            "tanh": (lambda x=x: x.tanh(), 2),
            "norm": (lambda x=x: torch.nn.functional.layer_norm(x, (256,)), 2),
            "random": (lambda x=x: torch.rand_like(x), 2),
        }[kind]
        yield tensors * x.nbytes, run


def _heavy(kind: str, large: bool, ones: Callable[..., torch.Tensor]) -> Iterator[tuple[float, Any]]:
    from torch.nn import functional as F

    if kind == "matmul":
        for width in (32, 256, 768) if not large else (512, 2048, 8192):
            a = ones(width, width)
            yield 2.0 * width**3, lambda a=a: a @ a
    elif kind == "convolution":
        for size in (8, 32) if not large else (32, 128):
            image, kernel = ones(4, 64, size, size), ones(64, 64, 3, 3)
            yield 2.0 * 4 * size**2 * 64 * 64 * 9, lambda i=image, k=kernel: F.conv2d(i, k, padding=1)
    else:
        causal = kind == "causal attention"
        for rows in (64, 256, 1024) if not large else (512, 2048, 8192):
            q = ones(1, 8, rows, 64)
            flops = 4.0 * 8 * rows**2 * 64
            yield flops, lambda q=q: F.scaled_dot_product_attention(q, q, q, is_causal=causal)
