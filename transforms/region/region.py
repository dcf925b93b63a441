"""What one call of `remat(fn)` is, to the engine: the function, its name, and what to check and select."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.profiler import record_function

from remat.transforms.closure import Slots, slots_of
from remat.transforms.compat import profiling
from remat.transforms.context import quiet
from remat.transforms.region.cache import Lessons, Memory
from remat.transforms.tape import Node, Record, Trace


class _Local(threading.local):
    """What this thread is running again."""

    def __init__(self) -> None:
        self.names: list[str] = []


_local = _Local()
_NOTHING = contextlib.nullcontext()


class Selector(Protocol):
    """Decides what is kept; made afresh for every run of a region's forward."""

    def decide(self, at: int, node: Node, args: Any, kwargs: Any, out: Any) -> int:
        """RECOMPUTE, OFFLOAD or SAVE for the op that just ran."""
        ...

    def watching(self, levels: bool = False) -> AbstractContextManager[Any]:
        """A context around the user's function in its forward; `levels`: torch.func may batch it."""
        ...

    def finished(self, trace: Trace) -> None:
        """Called once the forward is over and the trace is settled."""
        ...


class _Selecting(threading.local):
    innermost = False


_selecting = _Selecting()


def selecting() -> bool:
    """Whether the innermost region that runs around here, for the first time or again, may keep values."""
    return _selecting.innermost


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """Around a function that a policy lets run as it is: the innermost region there keeps all values."""
    before = _selecting.innermost
    _selecting.innermost = True
    try:
        yield
    finally:
        _selecting.innermost = before


@dataclass(frozen=True)
class Region:
    """A function to be rematerialized, with everything that does not depend on the arguments.

    Attributes:
        function: the user's callable.
        name: what messages and reports call it.
        selector: makes the `Selector` of one forward; None keeps nothing (cheaper than one that says so).
        preserve_rng_state: replay random numbers.
        determinism_check: "metadata", "exact" or "none".
        memory: what earlier calls taught about the function.
        key: what the selector's verdicts depend on besides the ops; None where one forward tells
            nothing of the next.
    """

    function: Callable[..., Any]
    name: str
    selector: Callable[[], Selector] | None
    preserve_rng_state: bool
    determinism_check: str
    memory: Memory
    key: Hashable | None = None

    @functools.cached_property
    def lessons(self) -> Lessons:
        """What earlier calls taught, under this policy. (To hash a policy takes longer than a small op.)"""
        return self.memory.under(self.key)

    @functools.cached_property
    def slots(self) -> Slots | None:
        """Where a module and those in it hold tensors, for `Bindings`; None for any other function."""
        return slots_of(self.function) if isinstance(self.function, torch.nn.Module) else None

    @property
    def digest(self) -> Callable[[Any], Any] | None:
        return _checksum if self.determinism_check == "exact" else None

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function as a part of a recording or of a recomputation."""
        before = _selecting.innermost
        if self.selector is None and not before:
            return self.function(*args, **kwargs)
        _selecting.innermost = self.selector is not None
        try:
            return self.function(*args, **kwargs)
        finally:
            _selecting.innermost = before

    def record(self, trace: Trace, selector: Selector | None, inputs: Sequence[torch.Tensor]) -> Record:
        return Record(trace, selector, inputs, self.digest)


def recomputing(name: str) -> Callable[[], Any]:
    """Begin to run the region `name` again on this thread; call what comes back at the end."""
    names = _local.names
    names.append(name)
    if not profiling():
        return names.pop
    label = labelled("recompute", name)
    label.__enter__()

    def end() -> None:
        label.__exit__(None, None, None)
        names.pop()

    return end


@contextlib.contextmanager
def planning(name: str) -> Iterator[None]:
    """Run the region `name` for what it would do: a run beside the passes, as a recomputation is."""
    _local.names.append(name)
    try:
        yield
    finally:
        _local.names.pop()


def labelled(phase: str, name: str) -> AbstractContextManager[Any]:
    """A label for the profiler's trace, such as `remat::recompute block`, if a profiler is on."""
    return record_function(f"remat::{phase} {name}") if profiling() else _NOTHING


def recomputed_region() -> str | None:
    """The name of the region that this thread is running again, None if it is running none."""
    names = _local.names
    return names[-1] if names else None


def is_recomputing() -> bool:
    """Whether the code that asks runs as part of a recomputation.

    Also where a budget is planned (once for each shape of the arguments, on tensors without data), and where
    `capture_grads` looks for names under `torch.func`. For counters, prints and logs: the same torch ops must
    run in both passes, and a tensor that code sets aside in the recomputation holds no numbers where the
    backward does not read it. For intermediates there is `remat.capture`.

    Example:
        >>> from remat import is_recomputing
        >>> is_recomputing()
        False
    """
    return bool(_local.names)


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
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    parts = torch.view_as_real(plain) if plain.is_complex() else plain
    # Flat before: a number of no dimension cannot be looked at as octets.
    words = parts.reshape(-1).view(torch.uint8).to(torch.int64)
    weights = (
        torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64) * 0x9E3779B97F4A7C1 | 1
    )
    return int((words * weights).sum().item())


__all__ = [
    "Region",
    "Selector",
    "choosing",
    "is_recomputing",
    "labelled",
    "planning",
    "quiet",
    "recomputed_region",
    "recomputing",
    "selecting",
]
