"""Speeds and memories of devices that plans and reports may be of."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Device:
    """What a device attains, and holds.

    Attributes:
        half: FLOP/s of matmuls in half precision.
        single: FLOP/s of float32 matmuls.
        bandwidth: of memory, bytes/s.
        memory: bytes that a program can have, 0 where that depends on the machine.
        label: what people call it.
        link: to other devices of its node, bytes/s.
    """

    half: float
    single: float
    bandwidth: float
    memory: int = 0
    label: str = ""
    link: float = 10e9

    def seconds(self, flops: float, moved: float, half: bool = True) -> float:
        """The roofline: what computing takes, or moving so many bytes, whichever is more."""
        return max(flops / (self.half if half else self.single), moved / self.bandwidth)


_GIB = 2**30
# Vendors' dense peaks times 0.6 to 0.7 for compute, and 0.8 for bandwidths: what large kernels attain. Memory
# is what torch reports as the device's total, rounded down: about 1 GiB less than on the label.
DEVICES = {
    "a100": Device(220e12, 110e12, 1.6e12, 79 * _GIB, "A100-80", 240e9),
    "h100": Device(600e12, 300e12, 2.7e12, 79 * _GIB, "H100-80", 360e9),
    "h200": Device(600e12, 300e12, 3.8e12, 139 * _GIB, "H200-141", 360e9),
    "b200": Device(1400e12, 700e12, 6.4e12, 178 * _GIB, "B200-192", 720e9),
    "mi300x": Device(700e12, 110e12, 4.2e12, 191 * _GIB, "MI300X-192", 300e9),
    "cpu": Device(100e9, 100e9, 20e9, 0, "CPU"),
}


def processor() -> str:
    """The processor's name where the system tells it, otherwise its architecture."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
