"""What `remat.fit` did, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from remat import nn
from remat._core import format_bytes
from remat._fit.held import HeldBytes


@dataclass(frozen=True)
class Fit:
    """What `remat.fit` did to a model.

    Attributes:
        model: the model.
        applied: names of the modules that are regions now: none where the step fits as it is.
        limit: bytes that were allowed.
        peak_bytes, plain_bytes: the most live at once in a step, with the regions and without, by simulation.
            All that lives throughout the step is included.
        held: what that is.
        cost, unit: price of what runs again in one step, such as 0.012 s.
        binds: what lives at the peak.
        policies: how many blocks have which policy.
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
    held: HeldBytes
    cost: float
    unit: str
    binds: str
    policies: dict[str, int]
    seconds: float = field(default=0.0, compare=False, repr=False)

    @property
    def per_gib(self) -> float:
        """Price of one GiB less at the peak: ms, where prices are seconds."""
        saved = (self.plain_bytes - self.peak_bytes) / 2**30
        return self.cost * (1e3 if self.unit == "s" else 1.0) / saved if saved > 0 else 0.0

    def remove(self) -> torch.nn.Module:
        """Make the blocks ordinary modules again."""
        return nn.remove(self.model)

    def __str__(self) -> str:
        before, limit = format_bytes(self.plain_bytes), format_bytes(self.limit)
        held = f"  held throughout: {format_bytes(self.held.bytes)} ({self.held})"
        if not self.applied:
            return f"{type(self.model).__name__} fits as it is: peak {before} of {limit}\n{held}"
        unit = "ms" if self.unit == "s" else self.unit
        cost = self.cost * (1e3 if self.unit == "s" else 1.0)
        rows = [f"  {count} x {name}" for name, count in self.policies.items()]
        return "\n".join(
            [
                f"{type(self.model).__name__}: peak {format_bytes(self.peak_bytes)} of {limit} ({before} "
                f"without remat), {cost:.4g} {unit} more a step, {self.per_gib:.4g} {unit} per GiB",
                f"  at the peak: {self.binds}",
                held,
                *rows,
            ]
        )
