"""What one call of `remat(fn)` is, to the engine: the function, its name, and what to check and select."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from remat.transforms._trace import Node, Record, Trace, quiet

_local = threading.local()


class Selector(Protocol):
    """Decides what is kept; made afresh for every run of a region's forward."""

    def decide(self, at: int, node: Node, args: Any, kwargs: Any, out: Any) -> int:
        """RECOMPUTE, OFFLOAD or SAVE for the op that just ran."""
        ...

    def watching(self) -> AbstractContextManager[Any]:
        """A context around the user's function in its forward."""
        ...

    def finished(self, trace: Trace) -> None:
        """Called once the forward is over and the trace is settled."""
        ...


@dataclass(frozen=True)
class Region:
    """A function to be rematerialized, with everything that does not depend on the arguments.

    Attributes:
        function: the user's callable.
        name: what messages and reports call it.
        selector: makes the `Selector` of one forward; None keeps nothing (cheaper than one that says so).
        preserve_rng_state: replay random numbers.
        determinism_check: "metadata", "exact" or "none".
        anchor: an object that lives as long as what was learnt about the function stays true.
        key: what the selector's verdicts depend on besides the ops; None where one forward tells
            nothing of the next.
    """

    function: Callable[..., Any]
    name: str
    selector: Callable[[], Selector] | None
    preserve_rng_state: bool
    determinism_check: str
    anchor: Any
    key: Hashable | None = None

    @property
    def digest(self) -> Callable[[Any], Any] | None:
        return _checksum if self.determinism_check == "exact" else None

    def record(self, trace: Trace, selector: Selector | None, inputs: Sequence[torch.Tensor]) -> Record:
        return Record(trace, selector, inputs, self.digest)


class recomputing:  # noqa: N801 - reads like the function that it would be, were it not for speed
    """Mark this thread as running a region again."""

    def __enter__(self) -> None:
        _local.depth = getattr(_local, "depth", 0) + 1

    def __exit__(self, *exc: Any) -> None:
        _local.depth -= 1


def is_recomputing() -> bool:
    """Whether the code that asks runs as part of a recomputation.

    Example:
        >>> from remat import is_recomputing
        >>> is_recomputing()
        False
    """
    return getattr(_local, "depth", 0) > 0


def _checksum(out: Any) -> Any:
    """A number for every tensor of `out` that changes with any bit of it, and with their order."""
    if isinstance(out, torch.Tensor):
        return _checksum_tensor(out.detach())
    if isinstance(out, (tuple, list)):
        return tuple([_checksum(value) for value in out])
    return out


def _checksum_tensor(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0 or tensor.layout is not torch.strided:
        return 0
    # Integer arithmetic modulo 2**64: exact, and the same on every device and in every order of summation.
    octets = torch.view_as_real(tensor).contiguous() if tensor.is_complex() else tensor.contiguous()
    words = octets.view(torch.uint8).reshape(-1).to(torch.int64)
    weights = (
        torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64) * 0x9E3779B97F4A7C1 | 1
    )
    return int((words * weights).sum().item())


__all__ = ["Region", "Selector", "is_recomputing", "quiet", "recomputing"]
