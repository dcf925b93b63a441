"""The bank: short programs, each of which does one thing that users do in the functions that they mark as
regions. `tests.ways` runs them."""

from tests.bank import blocks, forms, layouts, levels, nests, objects, pure, raw, state, torchs, writes
from tests.bank.program import BANK, Program, Subject, subject

# The order of the bank, by which ways are drawn, is that of these lines: what is new comes last.
# isort: split
from tests.bank import again, packs, turns

# isort: split
from tests.bank import steps

# isort: split
from tests.bank import tiles

__all__ = [
    "BANK", "Program", "Subject", "subject",
    "again", "blocks", "forms", "layouts", "levels", "nests", "objects", "pure", "raw", "state", "torchs",
    "packs", "steps", "tiles", "turns", "writes",
]  # fmt: skip
