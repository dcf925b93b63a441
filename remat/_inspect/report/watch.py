"""Watching one forward and backward: what ran, in which pass, for which region, and what lived meanwhile."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from remat._core import OpInfo, describe
from remat._inspect.report.timeline import Blocks, Timeline
from remat.policies import kind_of
from remat.transforms import (
    active,
    flatten,
    is_tensor,
    on_wrappers,
    recordings as context_recordings,
    traits,
    user_line,
)
from remat.transforms.compat import DispatchMode, graph_task, is_strided, storage_key, unwrapped
from remat.transforms.region import recomputed_region
from remat.transforms.tape import Kept

PASSES = ("forward", "recompute", "backward")
KINDS = ("matmul", "convolution", "attention", "collective", "normalization", "pointwise", "reduction")
KINDS += ("custom", "other")
TRANSFER = "transfer"  # of an offloaded value, to the host or back
# They move no number: counting them would call bookkeeping a recomputation.
_BOOKKEEPING = ("empty", "new_empty", "detach", "alias", "_unsafe_view", "set_", "resize_")
_NORMALIZATION = ("norm", "softmax")


@dataclass(frozen=True)
class Ran:
    """One op that ran.

    Attributes:
        when: "forward", "recompute" or "backward".
        op: the overload.
        kind: its class, one of `KINDS`, or `TRANSFER`.
        flops: floating point operations, 0 for ops without a formula.
        bytes: of its operands and results.
        region: the region that it ran for, or None.
        call: which call of an outermost region it belongs to in the forward, or None.
        inner: whether that region lies inside another one.
        location: the user's `file:line (function)`.
        half: whether its results have two bytes an element, or fewer.
    """

    when: str
    op: Any
    kind: str
    flops: int
    bytes: int
    region: str | None
    call: int | None
    inner: bool
    location: str
    half: bool = False


class Watch(DispatchMode):
    """Collects `Ran`s, and follows the bytes alive that ops have made."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Ran] = []
        self.blocks = Blocks()
        self.kept = KeptByRegion(self.blocks)
        self.forward = True
        self._calls: list[weakref.ref[Any]] = []
        self._boundary: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if active.aside:
            return func(*args, **kwargs)
        if types and on_wrappers(types):
            return NotImplemented
        out = func(*args, **kwargs)
        again, recordings = recomputed_region(), context_recordings()
        when = "recompute" if again is not None else self._when()
        if active.travelling != "host":
            region = again or (recordings[-1].tape.region if recordings else None)
            self.blocks.follow(len(self.ran), when, region, args, kwargs, out)
        if not _is_bookkeeping(func):
            recordings = recordings if when == "forward" else []
            self.ran.append(self._note(func, args, kwargs, out, when, again, recordings))
        return out

    def _note(
        self, func: Any, args: Any, kwargs: Any, out: Any, when: str, again: str | None, recordings: list[Any]
    ) -> Ran:
        if active.travelling:
            # Kept or not, no op of the user's or of a region's: what it takes are the bytes on the way.
            return Ran(self._when(), func, TRANSFER, 0, _bytes(out), None, None, False, user_line())
        outs = out if isinstance(out, (tuple, list)) else (out,)
        info = OpInfo(func, describe(args), describe(kwargs), describe(tuple(outs)))
        moved = sum(_bytes(t) for t in flatten((args, kwargs, out))[0] if is_tensor(t))
        region = recordings[-1].tape.region if recordings else again
        call = self._call(recordings[0].tape) if recordings else None
        inner = len(recordings) > 1
        return Ran(
            when,
            func,
            kind(func),
            info.flops,
            moved,
            region,
            call,
            inner,
            active.place or user_line(),
            any(is_tensor(t) and t.element_size() <= 2 for t in outs),
        )

    def _when(self) -> str:
        # A function that calls torch.func.grad has a backward inside.
        return "forward" if self.forward and graph_task() == -1 else "backward"

    def _call(self, trace: Any) -> int:
        for number, known in enumerate(self._calls):
            if known() is trace:
                return number
        self._calls.append(weakref.ref(trace))
        return len(self._calls) - 1

    def end_forward(self) -> None:
        """What runs from here on is no forward, unless a function takes derivatives itself."""
        self.forward = False
        self._boundary = len(self.ran)

    def timeline(self) -> Timeline:
        self.blocks.sweep(len(self.ran))
        return Timeline(tuple(self.ran), tuple(self.blocks.all), self._turn(), self.blocks.outside())

    def _turn(self) -> int:
        if self._boundary is not None:
            return self._boundary
        # A step that calls .backward() itself.
        return next((i for i, ran in enumerate(self.ran) if ran.when != "forward"), len(self.ran))


class KeptByRegion:
    """Adds up what regions report, without holding it: (region, why) -> bytes."""

    def __init__(self, blocks: Blocks) -> None:
        self.bytes: dict[tuple[str, str], int] = {}
        self._blocks = blocks
        self._seen: dict[int, StorageWeakRef] = {}

    def append(self, kept: Kept) -> None:
        tensor = unwrapped(kept.tensor)
        if not is_strided(tensor):
            return
        self._blocks.mark(storage_key(tensor), kept, _bytes(tensor))
        if storage_key(tensor) in self._seen:
            return
        storage = tensor.untyped_storage()
        self._seen[storage_key(tensor)] = StorageWeakRef(storage)
        key = kept.region, "offloaded" if kept.away else kept.why
        self.bytes[key] = self.bytes.get(key, 0) + storage.nbytes()


def kind(op: Any) -> str:
    """The class of an op, one of `KINDS`."""
    costly = kind_of(op)
    if costly is not None:
        return "matmul" if costly == "bmm" else costly
    if traits(op).functional:
        return "collective"
    if getattr(op, "namespace", "aten") not in ("aten", "prims"):
        return "custom"
    if any(part in traits(op).name for part in _NORMALIZATION):
        return "normalization"
    tags = getattr(op, "tags", ())
    if torch.Tag.pointwise in tags:
        return "pointwise"
    # The tag is younger than torch 2.11.
    return "reduction" if getattr(torch.Tag, "reduction", None) in tags else "other"


def _is_bookkeeping(op: Any) -> bool:
    facts = traits(op)
    return facts.ignored or facts.view or facts.name.startswith(_BOOKKEEPING)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
