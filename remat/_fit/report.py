"""What `remat.fit` did, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat import nn
from remat._core import format_bytes
from remat._fit.held import HeldBytes
from remat.transforms import RematError

# So many groups of layers are named.
_SHOWN = 12


@dataclass(frozen=True)
class Fit:
    """What `remat.fit` did to a model.

    Attributes:
        model: the model.
        applied: names of the modules that are regions now: none where the step fits as it is.
        limit: bytes that were allowed: live at once in the step, or with `by_budget` kept between its passes.
        peak_bytes, plain_bytes: the most live at once in a step, with the regions and without, by simulation.
            All that lives throughout the step is included.
        kept_bytes, default_bytes: what the blocks keep between the passes, with the regions and without.
        held: what that is.
        cost, unit: price of what runs again in one step, such as 0.012 s.
        binds: what lives at the peak.
        policies: how many blocks have which policy.
        layers: the policy of each block that is a region now, by its name.
        by_budget: whether a budget was given, in place of a peak.
        notes: what else is to be known of the plan.
        measured_bytes: the peak of a step that was run, beside `peak_bytes`; None until `measure()`.
        seconds: time that it took.

    Example:
        >>> import torch, remat
        >>> layer = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True)
        >>> model, x = torch.nn.TransformerEncoder(layer, 4), torch.randn(4, 16, 32)
        >>> done = remat.fit(model, x, peak="1MiB")
        >>> done.peak_bytes <= 2**20 < done.plain_bytes, len(done.applied)
        (True, 4)
    """

    model: torch.nn.Module = field(repr=False, compare=False)
    applied: tuple[str, ...]
    limit: int
    peak_bytes: int
    plain_bytes: int
    kept_bytes: int
    default_bytes: int
    held: HeldBytes
    cost: float
    unit: str
    binds: str
    policies: dict[str, int]
    layers: dict[str, str] = field(default_factory=dict)
    by_budget: bool = False
    notes: tuple[str, ...] = ()
    measured_bytes: int | None = None
    seconds: float = field(default=0.0, compare=False, repr=False)
    step: Any = field(default=None, compare=False, repr=False)

    @property
    def per_gib(self) -> float:
        """Price of one GiB less at the peak: ms, where prices are seconds."""
        saved = (self.plain_bytes - self.peak_bytes) / 2**30
        return self.cost * (1e3 if self.unit == "s" else 1.0) / saved if saved > 0 else 0.0

    def measure(self) -> Fit:
        """Run the step twice: the report with the measured peak of the second beside the planned one.

        On a CPU allocations are read from the profiler, on CUDA from the caching allocator. Tensors,
        gradients, random streams and attributes of modules are put back. Hooks and other effects of the
        model's Python happen.

        Example:
            >>> import torch, remat
            >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2), 2)
            >>> report = remat.fit(model, torch.randn(16, 4, 32), peak="1GiB").measure()
            >>> "measured" in str(report), abs(report.measured_bytes / report.peak_bytes - 1) < 0.02
            (True, True)
        """
        if self.step is None:
            raise RematError(
                "This report has no step to run: call remat.fit, and measure() on what it returns."
            )
        return replace(self, measured_bytes=self.step.measured() + self.held.bytes)

    def remove(self) -> torch.nn.Module:
        """Make the blocks ordinary modules again."""
        return nn.remove(self.model)

    @property
    def _beside(self) -> str:
        """What was measured, beside what was planned."""
        return "" if self.measured_bytes is None else f" (measured {format_bytes(self.measured_bytes)})"

    def __str__(self) -> str:
        before, limit = format_bytes(self.plain_bytes), f" of {format_bytes(self.limit)}"
        if self.by_budget:
            kept, default = format_bytes(self.kept_bytes), format_bytes(self.default_bytes)
            limit = f", {kept} kept of {default} (budget {format_bytes(self.limit)})"
        held = f"  held throughout: {format_bytes(self.held.bytes)} ({self.held})"
        notes = [f"  note: {note}" for note in self.notes]
        if not self.applied:
            head = f"{type(self.model).__name__} fits as it is: peak {before}{self._beside}{limit}"
            return "\n".join([head, held, *notes])
        unit = "ms" if self.unit == "s" else self.unit
        cost = self.cost * (1e3 if self.unit == "s" else 1.0)
        names: dict[str, list[str]] = {}
        for name, policy in self.layers.items():
            names.setdefault(policy, []).append(name)
        return "\n".join(
            [
                f"{type(self.model).__name__}: peak {format_bytes(self.peak_bytes)}{self._beside}{limit} "
                f"({before} without remat), {cost:.4g} {unit} more a step, {self.per_gib:.4g} {unit} per GiB",
                f"  at the peak: {self.binds}",
                held,
                *[f"  {_ranges(found)}: {policy}" for policy, found in names.items()],
                *notes,
            ]
        )


def _ranges(names: Sequence[str]) -> str:
    """Names in few words: those that differ in one number alone, and follow each other, as "layers.0-3"."""
    found: list[tuple[str, int, int, str]] = []
    for name in names:
        head, number, tail = _numbered(name)
        if found and number >= 0:
            before = found[-1]
            if (before[0], before[3]) == (head, tail) and before[2] + 1 == number:
                found[-1] = head, before[1], number, tail
                continue
        found.append((head, number, number, tail))
    parts = [
        f"{head}{first}{f'-{last}' if last > first else ''}{tail}" if first >= 0 else head
        for head, first, last, tail in found
    ]
    return (
        ", ".join(parts)
        if len(parts) <= _SHOWN
        else f"{', '.join(parts[:_SHOWN])} and {len(parts) - _SHOWN} more"
    )


def _numbered(name: str) -> tuple[str, int, str]:
    """A name in front of its last number, the number (-1 where there is none), and behind it."""
    parts = name.split(".")
    at = next((k for k in reversed(range(len(parts))) if parts[k].isdigit()), -1)
    if at < 0:
        return name, -1, ""
    head, tail = ".".join(parts[:at]), ".".join(parts[at + 1 :])
    return f"{head}." if head else "", int(parts[at]), f".{tail}" if tail else ""
