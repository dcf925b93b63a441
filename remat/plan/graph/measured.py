"""Prices by stopwatch: each op timed once on this device, remembered on disk."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from remat.plan.graph.disk import read_table, table_path, write_table
from remat.plan.graph.stopwatch import alone, best_seconds
from remat.plan.graph.traffic import is_view, traffic
from remat.plan.joint import Joint, Op, Ref
from remat.transforms import BoundedCache, RematError, map_only

# Timings that are kept for one device, on disk too.
_MOST = 1 << 16


@dataclass(frozen=True)
class Measured:
    """Seconds of one call, the least of five on tensors of the op's own sizes.

    Some ops cannot be run by themselves: random state of their own, missing kernels, arguments that must hold
        certain values. They are priced by their traffic at the speed of a copy.

    Attributes:
        device: where to run; None means where each op's tensors are.
    """

    device: str | None = None
    unit: str = field(default="s", init=False, repr=False)
    accuracy: ClassVar[float] = 0.01

    def price(self, joint: Joint, op: Op) -> float:
        """Seconds of one call of `op`."""
        if is_view(joint, op):
            return 0.0
        key, device = self._key(joint, op)
        table = _table(device)
        if key not in table:
            with alone(device):
                table[key] = self._time(joint, op, device)
            write_table(table_path("ops", device), table)
        return table[key]

    def _key(self, joint: Joint, op: Op) -> tuple[str, str]:
        device = self.device or next((str(joint.values[v].device) for v in (*op.outputs, *op.reads)), "cpu")
        if device == "meta":
            raise RematError(
                'cost="measured" runs each op, and these tensors have no data: say on which device, as '
                'device="cpu", or write cost="roofline".'
            )
        given = map_only(Ref, lambda r: described(joint, r), (op.args, op.kwargs))
        text = f"{op.name} {given}"
        return hashlib.sha256(text.encode()).hexdigest()[:24], device

    def _time(self, joint: Joint, op: Op, device: str) -> float:
        try:
            args, kwargs = map_only(Ref, lambda r: tensor_like(joint, r, device), (op.args, op.kwargs))
            return best_seconds(lambda: op.target(*args, **kwargs), device)
        except Exception:
            # Whatever keeps one op from running alone, its price is no reason to fail a plan.
            return traffic(joint, op) / _copy_speed(device)


def described(joint: Joint, ref: Ref) -> str:
    """A value in words that tell its kernels apart."""
    value = joint.values[ref.id]
    return f"{value.dtype}{value.shape}{value.stride}{'conjugate' if value.conjugate else ''}"


def tensor_like(joint: Joint, ref: Ref, device: str) -> torch.Tensor:
    """A tensor like a value."""
    value = joint.values[ref.id]
    made = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    # Zeros are valid indices and fast to make, but too kind to some kernels: floats get ordinary numbers.
    made = made.normal_() if value.dtype.is_floating_point and 0 not in value.stride else made.zero_()
    return made.conj() if value.conjugate else made


@functools.lru_cache(maxsize=8)
def _copy_speed(device: str) -> float:
    """Bytes a second of a large copy, reads and writes counted."""
    source = torch.zeros(1 << 24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / best_seconds(lambda: target.copy_(source), device)


@functools.lru_cache(maxsize=8)
def _table(device: str) -> BoundedCache[str, float]:
    return BoundedCache(_MOST, read_table(table_path("ops", device)).items())
