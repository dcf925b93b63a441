"""Speeds of processors that were probed (`python -m remat env --measure`), for those that were not."""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from remat._core import DEVICES, processor

_logger = logging.getLogger("remat")
# Bits of a vector, by what torch says that its kernels use.
_BITS = {"AVX512": 512, "AVX2": 256}


class Processor(NamedTuple):
    """A processor as torch uses it, so many threads of it, and its clock in GHz (0: not known)."""

    name: str
    threads: int
    clock: float
    bits: int

    def __str__(self) -> str:
        return f"{self.name} (threads: {self.threads}, {self.clock:.1f} GHz, {self.bits} bits)"

    def far(self, other: Processor) -> float:
        """How unlike another one is, in doublings."""
        return sum(abs(math.log2(a / b)) for a, b in zip(self[1:], other[1:], strict=True) if a and b)


def at_hand() -> Processor:
    """This machine's."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    bits = _BITS.get(torch.backends.cpu.get_cpu_capability(), 128)
    return Processor(processor(), torch.get_num_threads(), max(clocks, default=0.0) / 1e3, bits)


@functools.lru_cache(maxsize=16)
def nearest(threads: int) -> dict[str, Any]:
    """The speeds of the probed processor that is most like this one with so many threads; says whose."""
    mine = at_hand()._replace(threads=threads)
    row = min(PROBED, key=lambda one: (mine.far(one), one))
    if row[:2] != mine[:2] or row.bits != mine.bits:
        _logger.warning(
            "Plans here have the prices of %s, the nearest processor that was probed: "
            "`python -m remat env --measure` measures this one, %s.",
            row,
            mine,
        )
    return PROBED[row]


def card_like(device: str) -> str:
    """The key of `DEVICES` for a card of this machine; an h100 where none has its name, which is said."""
    name = torch.cuda.get_device_name(device)
    found = next((key for key in DEVICES if key in name.lower().replace(" ", "")), None)
    return found or _unlike(name)


@functools.lru_cache(maxsize=16)
def _unlike(name: str) -> str:
    text = "Plans here have the prices of an h100: `python -m remat env --measure` measures this card, %s."
    _logger.warning(text, name)
    return "h100"


# Work and work per second, as `Speeds` has them: the best of two probes each. torch 2.13.0.
PROBED: dict[Processor, dict[str, Any]] = {
    Processor("AMD EPYC", 1, 2.6, 512): {
        "attention backward bfloat16": ((2.1e7, 1.77e10), (3.36e8, 7.16e10)),
        "attention backward float16": ((2.1e7, 8.57e9), (3.36e8, 1.06e10)),
        "attention backward float32": ((2.1e7, 5.67e10), (3.36e8, 8.11e10)),
        "attention backward float64": ((2.1e7, 2.43e10), (3.36e8, 3.48e10)),
        "attention bfloat16": ((8.39e6, 5.28e10), (1.34e8, 7.73e10), (2.15e9, 8.66e10)),
        "attention float16": ((8.39e6, 2.46e10), (1.34e8, 4e10)),
        "attention float32": ((8.39e6, 5.79e10), (1.34e8, 7.15e10), (2.15e9, 8.48e10)),
        "attention float64": ((8.39e6, 2.19e10), (1.34e8, 3.43e10)),
        "call": 1.66e-6,
        "clone bfloat16": ((6.55e4, 6.23e10), (1.05e6, 7.09e10), (1.68e7, 3e10)),
        "clone float16": ((6.55e4, 5.93e10), (1.05e6, 5.75e10), (1.68e7, 3.76e10)),
        "clone float32": ((1.31e5, 9.04e10), (2.1e6, 5.4e10), (3.36e7, 2.79e10)),
        "clone float64": ((2.62e5, 1.05e11), (4.19e6, 3.59e10)),
        "convolution bfloat16": ((1.89e7, 1.89e11), (3.02e8, 3.53e11)),
        "convolution float16": ((1.89e7, 3.86e9),),
        "convolution float32": ((1.89e7, 1.4e11), (3.02e8, 1.71e11)),
        "convolution float64": ((1.89e7, 3.29e10), (3.02e8, 2.61e10)),
        "copy bfloat16": ((9.83e4, 4.96e10), (1.57e6, 4.03e10), (2.52e7, 3.96e10)),
        "copy float16": ((9.83e4, 6.62e10), (1.57e6, 5.84e10), (2.52e7, 5.44e10)),
        "copy float32": ((1.97e5, 1.38e11), (3.15e6, 8.48e10), (5.03e7, 4.27e10)),
        "copy float64": ((3.93e5, 1.15e11), (6.29e6, 7.37e10)),
        "in a step": (2.03e-6, 0.000683, 4.93e-5),
        "linalg bfloat16": ((6.99e5, 1.02e10), (4.47e7, 2.37e10)),
        "linalg float16": ((6.99e5, 1.02e10), (4.47e7, 2.37e10)),
        "linalg float32": ((6.99e5, 1.02e10), (4.47e7, 2.37e10)),
        "linalg float64": ((6.99e5, 1.61e10), (4.47e7, 1.83e10)),
        "math bfloat16": ((6.55e4, 8.81e9), (1.05e6, 1.46e10), (1.68e7, 1.2e10)),
        "math float16": ((6.55e4, 1.11e10), (1.05e6, 1e10), (1.68e7, 9.91e9)),
        "math float32": ((1.31e5, 1.81e10), (2.1e6, 2.28e10), (3.36e7, 1.38e10)),
        "math float64": ((2.62e5, 9e9), (4.19e6, 8.72e9)),
        "matmul bfloat16": ((5.24e5, 4.45e10), (3.36e7, 3.59e11), (9.06e8, 4.18e11)),
        "matmul float16": ((5.24e5, 6.43e9), (3.36e7, 2.75e9)),
        "matmul float32": ((5.24e5, 1.13e11), (3.36e7, 9.14e10), (9.06e8, 1.01e11)),
        "matmul float64": ((5.24e5, 4.3e10), (3.36e7, 4.55e10), (9.06e8, 5.64e10)),
        "narrow attention backward bfloat16": ((1.05e7, 9.84e9), (1.68e8, 4.72e10)),
        "narrow attention backward float16": ((1.05e7, 8.32e9), (1.68e8, 1.01e10)),
        "narrow attention backward float32": ((1.05e7, 4.91e10), (1.68e8, 7.2e10), (2.68e9, 7.63e10)),
        "narrow attention backward float64": ((1.05e7, 2.09e10), (1.68e8, 2.68e10)),
        "narrow attention bfloat16": ((4.19e6, 4.15e10), (6.71e7, 6.53e10), (1.07e9, 7.42e10)),
        "narrow attention float16": ((4.19e6, 2.02e10), (6.71e7, 3.22e10), (1.07e9, 4.36e10)),
        "narrow attention float32": ((4.19e6, 4.98e10), (6.71e7, 7.01e10), (1.07e9, 7.99e10)),
        "narrow attention float64": ((4.19e6, 1.62e10), (6.71e7, 2.73e10), (1.07e9, 3.03e10)),
        "norm bfloat16": ((6.55e4, 8.59e9), (1.05e6, 9.59e9), (1.68e7, 9.44e9)),
        "norm float16": ((6.55e4, 9.73e9), (1.05e6, 1.04e10), (1.68e7, 1.03e10)),
        "norm float32": ((1.31e5, 2.26e10), (2.1e6, 2.51e10), (3.36e7, 2.51e10)),
        "norm float64": ((2.62e5, 2.86e10), (4.19e6, 3.2e10)),
        "random bfloat16": ((6.55e4, 1.37e9), (1.05e6, 1.33e9), (1.68e7, 1.34e9)),
        "random float16": ((6.55e4, 1.66e9), (1.05e6, 1.58e9), (1.68e7, 1.52e9)),
        "random float32": ((1.31e5, 4.19e9), (2.1e6, 3.97e9), (3.36e7, 4.1e9)),
        "random float64": ((2.62e5, 5.17e9), (4.19e6, 5.09e9)),
        "tanh bfloat16": ((6.55e4, 3.87e9), (1.05e6, 3.67e9), (1.68e7, 3.74e9)),
        "tanh float16": ((6.55e4, 3.94e9), (1.05e6, 3.68e9), (1.68e7, 3.8e9)),
        "tanh float32": ((1.31e5, 3.84e9), (2.1e6, 3.75e9), (3.36e7, 3.85e9)),
        "tanh float64": ((2.62e5, 4.17e9), (4.19e6, 4.01e9)),
    },
}
