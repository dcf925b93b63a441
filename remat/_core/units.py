"""Amounts of bytes as users write them, and as they read them; shapes as they read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_UNITS = {"": 1} | {f"{p}{i}": (1024 if i else 1000) ** n for n, p in enumerate("kmgt", 1) for i in ("", "i")}

# Numbers that an optimizer holds for each parameter.
OPTIMIZERS = {"adamw": 2, "adam": 2, "lion": 1, "momentum": 1, "muon": 1, "sgd": 0, "none": 0}


def parse_bytes(text: str) -> int:
    """Bytes from "2GiB", "512 MB", "1e9".

    Raises:
        ValueError: where the text is not an amount of bytes.

    Example:
        >>> from remat._core.units import parse_bytes
        >>> parse_bytes("1.5 KiB")
        1536
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+]?[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    try:
        return int(float(match[1]) * _UNITS[match[2]])  # type: ignore[index]
    except (TypeError, ValueError, KeyError, OverflowError):
        raise ValueError(f"{text!r} is not an amount of bytes: write 4096, '512KiB' or '2GB'.") from None


def format_bytes(count: float) -> str:
    """Bytes for people, rounded; where a number is to be written somewhere, messages give it in full.

    Example:
        >>> from remat._core.units import format_bytes
        >>> format_bytes(512), format_bytes(1536)
        ('512 B', '1.5 KiB')
    """
    if round(count) < 1024:
        return f"{count:.0f} B"
    units = ["KiB", "MiB", "GiB", "TiB"]
    count /= 1024
    # What is rounded to 1024.0 is one of the next.
    while round(count, 1) >= 1024 and len(units) > 1:
        count, units = count / 1024, units[1:]
    return f"{count:.1f} {units[0]}"


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "bool"}


def format_shape(dtype: Any, shape: Sequence[Any]) -> str:
    """A dtype and sizes in one word.

    Example:
        >>> import torch
        >>> from remat._core.units import format_shape
        >>> format_shape(torch.bfloat16, (4, 8))
        'bf16[4,8]'
    """
    kind = str(dtype).removeprefix("torch.")
    letters = kind.rstrip("0123456789")
    return f"{_SHORT.get(letters, letters)}{kind[len(letters) :]}[{','.join(map(str, shape))}]"
