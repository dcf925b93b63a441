"""Triton's kernels as machine code of a GPU, made on any machine."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from remat._core import first_line
from remat.gpu.inductor.machine import Chip, pretended
from remat.transforms import RematError


@dataclass(frozen=True)
class Cubin:
    """What the compiler says of a kernel, in the first of the configurations that a GPU would try.

    Attributes:
        registers: of one thread.
        spills: 4-byte words of a thread that did not fit into registers.
        shared: bytes of shared memory of a block.
        bytes: size of the machine code.
    """

    registers: int
    spills: int
    shared: int
    bytes: int


def cubin(name: str, source: str, chip: Chip) -> Cubin:
    """The machine code of a kernel of `Lowered.source`; the same text is compiled once."""
    # Only the number at the end of its name tells a kernel from one that is the same.
    plain = re.sub(rf"\b{re.escape(name)}\b", "kernel", source)
    try:
        return _compiled(plain, chip)
    except Exception as error:
        raise RematError(
            f"Triton makes no machine code of the kernel {name} for {chip.name}: {type(error).__name__}: "
            f"{first_line(error)}. compile_for(..., machine_code=False) does without."
        ) from error


@lru_cache(maxsize=4096)
def _compiled(source: str, chip: Chip) -> Cubin:
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache

    # The static launcher would hand the code to a driver.
    with pretended(chip), config.patch(use_static_triton_launcher=False):
        tuner: Any = PyCodeCache.load(source).kernel
        binary: Any = tuner._precompile_config(tuner.configs[0]).kernel
    code = binary.asm["cubin"]
    notes = _notes(code)
    spills = notes.get(_FRAME_SIZE, 0) // 4
    return Cubin(notes.get(_REGISTERS, 0), spills, binary.metadata.shared, len(code))


_REGISTERS, _FRAME_SIZE = 0x2F, 0x11  # attributes of the section .nv.info, each of one function
_ONE_VALUE = 4  # the format of an attribute that is a symbol and a value


def _notes(code: bytes) -> dict[int, int]:
    """What the section .nv.info of machine code (a 64-bit ELF file) says: attribute -> largest value."""
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count, names = struct.unpack_from("<HHH", code, 58)
    sections = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    found: dict[int, int] = {}
    for name, _, _, _, offset, length in sections:
        at = sections[names][4] + name
        if code[at : code.index(b"\0", at)] != b".nv.info":
            continue
        here, end = offset, offset + length
        while here + 4 <= end:
            form, attribute, value = struct.unpack_from("<BBH", code, here)
            if form == _ONE_VALUE:
                if value == 8:
                    (told,) = struct.unpack_from("<I", code, here + 8)
                    found[attribute] = max(told, found.get(attribute, 0))
                here += value
            here += 4
    return found
