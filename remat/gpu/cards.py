"""The GPUs that code can be made for."""

from __future__ import annotations

from remat._core import DEVICES, Device
from remat.gpu.inductor import Chip
from remat.transforms import RematError

# Compute capability, multiprocessors, and shared memory of a block, by NVIDIA's tables.
_CHIPS = {
    "a100": ((8, 0), 108, 166_912),
    "h100": ((9, 0), 132, 232_448),
    "h200": ((9, 0), 132, 232_448),
    "b200": ((10, 0), 148, 232_448),
}
CARDS = tuple(_CHIPS)


def card(name: str) -> tuple[Chip, Device]:
    """What compilers ask of the GPU called `name`, and what it attains.

    Raises:
        RematError: no such GPU is known.
    """
    if name not in _CHIPS:
        raise RematError(f"code can be made for {', '.join(CARDS)}, not for {name!r}. Write device='h100'.")
    speeds = DEVICES[name]
    capability, processors, shared = _CHIPS[name]
    return Chip(f"NVIDIA {name.upper()}", capability, processors, shared, speeds.memory), speeds
