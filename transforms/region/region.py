"""What one call of `remat(fn)` is, to the engine: the function, its name, and what to check and select."""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from remat.transforms.context import ranks_met
from remat.transforms.objects import is_module, is_tensor
from remat.transforms.region.cache import CachedTrace, TraceCache, Traces, cache_of, of_kinds
from remat.transforms.tape import Node, Tape


class Selector(Protocol):
    """Decides what is kept; made afresh for every run of a region's forward."""

    def decide(self, at: int, node: Node, args: Any, kwargs: Any, out: Any) -> int:
        """RECOMPUTE, OFFLOAD or SAVE for the op that just ran."""
        ...

    def watching(self, levels: bool = False) -> AbstractContextManager[Any]:
        """A context around the user's function in its forward; `levels`: torch.func may batch it."""
        ...

    def finished(self, tape: Tape) -> None:
        """Called once the forward is over and settled."""
        ...


class Ranks(Protocol):
    """Compares what regions keep with other ranks, which may wait for the collectives of a recomputation.

    Attributes:
        unmet: what is not compared yet: while there is any, calls that follow a trace are compared, too.
    """

    unmet: list[Any]

    def compare(self, frame: Any, recorder: Any, results: Any) -> None:
        """Compare what a frame keeps that has settled. May raise a RematError, on every rank."""
        ...

    def compare_pulled(self, region: Region, recorder: Any) -> Callable[[], None] | None:
        """The same for a primitive: what its pull-back is to call, None for nothing."""
        ...

    def compare_traced(self, region: Region, record: Any) -> None:
        """The same for a graph."""
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
        anchor: with whose life what was learnt about the function ends.
        key: what the selector's verdicts depend on besides the ops; None where one forward tells
            nothing of the next.
        decisions: whether decisions are kept, whatever the selector says.
        digest: a number for an op's results that any other bit changes, None where they are not compared so.
        shares: whether what depends on nothing that the region is given may be computed once in a graph.
        ranks: what compares with other ranks, if anything does.
    """

    function: Callable[..., Any]
    name: str
    selector: Callable[[], Selector] | None
    preserve_rng_state: bool
    determinism_check: str
    anchor: Any
    key: Hashable | None = None
    decisions: bool = True
    digest: Callable[[Any], Any] | None = None
    shares: bool = True
    ranks: Ranks | None = None

    def compares_results(self, drawn: bool) -> bool:
        """Whether a run that cannot be compared by its ops is to return what the first did. `drawn`: whether
        that one drew random numbers."""
        return self.determinism_check != "none" and (self.preserve_rng_state or not drawn)

    @functools.cached_property
    def cache(self) -> TraceCache:
        """What earlier calls of the function did. (Graphs that are traced ask for none.)"""
        return cache_of(self.anchor)

    @functools.cached_property
    def traces(self) -> Traces:
        """What earlier calls did under this policy. (To hash a policy takes longer than a small op.)"""
        return self.cache.under(self.key)

    @functools.cached_property
    def kind(self) -> Hashable | None:
        """What regions have in common that may run the same ops, as the layers of a model; None for others
        than modules."""
        function = self.function
        method = type(function) is types.MethodType
        owner = function.__self__ if method else function
        if not is_module(owner):
            return None
        what = type(owner), function.__func__ if method else None
        return what, self.name, self.key, self.decisions, self.preserve_rng_state, self.shares

    def alike(self, signature: Hashable) -> CachedTrace | None:
        """What a call with this signature did of another region of this kind: each op is compared.

        Not where ranks compare what they keep: they do so in the call that records.
        """
        if self.kind is None or self.cache.apart or self.digest is not None:
            return None
        if self.ranks is not None and ranks_met():
            return None
        return of_kinds.get((self.kind, signature))

    def learn(self, signature: Hashable, known: CachedTrace | None, frame: Any) -> None:
        """Note what a forward that was held against `known` tells of later calls with its signature."""
        cache, traces = self.cache, self.traces
        if known is not None and frame.tape is known.tape:
            traces[signature] = known
            return
        cache.apart = cache.apart or (known is not None and signature not in traces)
        if (trace := frame.lesson()) is None:
            traces.pop(signature, None)
            return
        traces[signature] = trace
        if self.kind is not None and not (cache.differentiates or cache.apart):
            of_kinds[self.kind, signature] = trace

    @functools.cached_property
    def released(self) -> Region:
        """The same for a call that does not run the function again: what a local one captures besides
        modules may be held by nothing else."""
        if type(self.function) not in (types.FunctionType, functools.partial):
            return self
        function = _released(self.function)
        return self if function is self.function else replace(self, function=function)

    def was_run(self, signature: Hashable) -> bool:
        """Whether a call with this signature was run under this policy, and may be held against its trace."""
        return signature in self.traces or (self.key, signature) in self.cache.lasting


_SMALL = frozenset((int, float, str, bool, type(None), type, types.BuiltinFunctionType, types.ModuleType))


def _released(value: Any, around: tuple[Any, ...] = ()) -> Any:
    """A local function with the names that it has, and of what it captures modules and functions alone.
    `around`: those that capture it; one that captures itself is not followed."""
    kind, around = type(value), (*around, value)
    if kind is functools.partial:
        given = {name: _released(arg, around) for name, arg in value.keywords.items()}
        args = [_released(arg, around) for arg in value.args]
        return functools.partial(_released(value.func, around) or _gone, *args, **given)
    if kind is not types.FunctionType:
        if is_tensor(value):
            return weakref.ref(value)  # messages have its name
        owner = value.__self__ if kind is types.MethodType else value
        return value if kind in _SMALL or is_module(owner) else None
    closure = value.__closure__ or ()
    cells = tuple([_released_cell(cell, around) for cell in closure])
    given = value.__defaults__ or ()
    defaults = tuple([_released(default, around) for default in given])
    if all(map(operator.is_, (*cells, *defaults), (*closure, *given))):
        return value
    made = types.FunctionType(value.__code__, {}, value.__name__, defaults, cells)
    made.__kwdefaults__ = dict.fromkeys(value.__kwdefaults__ or ()) or None
    return made


def _gone(*_: Any, **__: Any) -> None:
    """Stands for an object that a partial calls: it may lead to tensors, and is not called again."""


def _released_cell(cell: types.CellType, around: tuple[Any, ...]) -> types.CellType:
    try:
        value = cell.cell_contents
    except ValueError:
        return cell  # not filled yet
    kept = None if any([value is one for one in around]) else _released(value, around)
    return cell if kept is value else types.CellType(kept)


def checksum(out: Any) -> Any:
    """A number for every tensor of `out` that changes with any bit of it, and with their order."""
    if isinstance(out, torch.Tensor):
        return _checksum_tensor(out.detach())
    if isinstance(out, (tuple, list)):
        return tuple([checksum(value) for value in out])
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
