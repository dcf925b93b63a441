"""The bank: short programs, each of which does one thing that users do in the functions that they mark as
regions. `tests.ways` runs them."""

from tests.bank import blocks, forms, layouts, levels, nests, objects, pure, raw, state, torchs, writes
from tests.bank.program import BANK, Program, Subject, subject

__all__ = [
    "BANK", "Program", "Subject", "subject",
    "blocks", "forms", "layouts", "levels", "nests", "objects", "pure", "raw", "state", "torchs", "writes",
]  # fmt: skip
