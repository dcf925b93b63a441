"""Real text that every machine with Python has: the standard library's own sources."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from itertools import accumulate, takewhile
from pathlib import Path

import torch


def corpus(limit: int = 4_000_000) -> torch.Tensor:
    """Bytes of the standard library's top-level `.py` files by name: uint8, at most `limit` of them."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    sizes = accumulate(file.stat().st_size for file in files)
    # Whole files up to the first that goes past the limit, which is cut.
    needed = len(list(takewhile(lambda size: size < limit, sizes))) + 1
    data = b"".join(file.read_bytes() for file in files[:needed])[:limit]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batches(batch: int, seq: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Endless random windows of the corpus: int64 [batch, seq + 1], the last byte being a target only."""
    text = corpus()
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(seq + 1)
    while True:
        starts = torch.randint(len(text) - seq, (batch, 1), generator=generator)
        yield text[starts + offsets].long()
