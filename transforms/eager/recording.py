"""The frame that watches every op of its forward, and so recomputes no more than the backward reads."""

from __future__ import annotations

import contextlib
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch

from remat.transforms.compat import graph_task, next_node, pop_hooks, push_hooks, unseen
from remat.transforms.context import enclosing, quiet, recordings
from remat.transforms.eager.frame import Selective
from remat.transforms.eager.inputs import Inputs
from remat.transforms.eager.saved import Absent, Held, watcher
from remat.transforms.ops import traits
from remat.transforms.pytree import flatten, split
from remat.transforms.region import Plan, reach, repeats
from remat.transforms.tape import (
    OUTSIDE,
    SAVE,
    Calls,
    Ends,
    Kept,
    Program,
    Record,
    Replay,
    Stop,
    Trace,
    Unknown,
    held_tensors,
    listening,
    report,
)
from remat.transforms.tape import storage as tape_storage


class Handle:
    """What autograd holds in the place of a value: it is gone when no backward can want the value."""

    __slots__ = ("__weakref__", "at")

    def __init__(self, at: int) -> None:
        self.at = at


class Packed:
    """What a trace knows of one packed value.

    Attributes:
        made: the op that made it, None for one from outside.
        sources: the ops that its value takes: what made it, if only by a look at a tensor from outside, and
            what wrote into it.
        seen: how many ops had run when it was packed.
        storage: of one from outside.
        owner: the autograd node it was packed for, None where that is not certain.
        handle: what autograd holds.
    """

    __slots__ = ("handle", "made", "owner", "seen", "sources", "storage")

    def __init__(
        self, made: int | None, sources: tuple[int, ...], seen: int, owner: int | None, handle: Handle
    ) -> None:
        self.made, self.sources, self.seen = made, sources, seen
        self.owner, self.handle = owner, weakref.ref(handle)
        self.storage = 0


class Traced(Selective):
    """Records its forward (`tape.recorder.Record`) and replays it (`tape.replay.Replay`)."""

    __slots__ = (
        "again",
        "alive",
        "calls",
        "ends",
        "hoard",
        "learns",
        "packed",
        "part",
        "record",
        "start",
        "tell",
        "trace",
    )

    def __init__(self, inputs: Inputs, learns: bool = False) -> None:
        """
        Args:
            learns: whether later calls are to know what this one does.
        """
        super().__init__(inputs)
        self.calls: Calls | None = None
        # With hooks of others around, and under autocast, what is packed depends on more than the ops.
        self.learns = learns and inputs.hooks is None and not inputs.ambient.casts
        self.trace = Trace(self.region.name)
        self.packed: list[Packed] = []
        self.hoard: list[torch.Tensor] | None = []  # all packed values, while they are few
        # All packed values until the forward is over, for a function that goes backward itself.
        self.alive: list[torch.Tensor] | None = [] if self.region.memory.differentiates else None
        self.start = next_node()
        self.ends: Ends | None = None
        self.again = False  # whether what was kept went to an earlier recomputation
        self.tell = watcher(inputs.hooks)
        self.part: set[int] | None = None  # the packed values that the recomputation makes, None for all
        self.record: Record | None = None

    # -- forward ---------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region, inputs = self.region, self.inputs
        selector = region.selector() if region.selector else None
        self.record = record = region.record(self.trace, selector, inputs.tensors)
        record.uncached = inputs.uncached(inputs.tensors)
        if self.learns:
            record.calls = Calls([*inputs.tensors, *inputs.bindings.near])
        watching = selector.watching() if selector else contextlib.nullcontext()
        with watching, record:
            push_hooks(self.pack_traced, self.unpack)
            try:
                out = region.run(args, kwargs)
            finally:
                pop_hooks()
                # Whatever it holds leads back here through the graph, were the forward to fail.
                self.record = self.alive = None
        self.calls = record.calls
        self._find_ends(out)
        self._settle(record, out)
        if selector:
            selector.finished(self.trace)
        return out

    def pack_traced(self, tensor: torch.Tensor) -> Handle:
        at = self.pack(tensor)
        record = self.record
        assert record is not None
        if record.calls is not None:
            record.calls.save(tensor)
        found = record.find(tensor)
        made = record.origin(tensor)
        sources = () if found is None else record.sources(found)
        # What a region inside this one keeps is no node's of this one.
        owner = None if self.inner else next_node() - 1
        handle = Handle(at)
        self.packed.append(packed := Packed(made, sources, record.position, owner, handle))
        if made is None:
            packed.storage = tape_storage(tensor)
            if self.tell is not None:
                self.tell(tensor)
        if record.shares_kept(made) if made is not None else self.inputs.hooks is None:
            # From outside, or a view of something kept: holding it costs nothing more. (What an enclosing
            # region is to recompute is not held.)
            self.direct[at] = Held(tensor, None)
        if self.alive is not None:
            self.alive.append(tensor)
        if self.hoard is not None:
            self.hoard.append(tensor)
            if _bytes(self.hoard) > _bytes(self.inputs.tensors) + record.kept_bytes:
                self.hoard = None
        return handle

    def _find_ends(self, out: Any) -> None:
        """Note which results need what, where they do not all need the same."""
        tensors = [t for t in split(flatten(out)[0])[0] if t.grad_fn is not None]
        if len(tensors) > 1:
            ends = Ends(tensors, self.start)
            self.ends = ends if ends.differ else None

    def _settle(self, record: Record, out: Any) -> None:
        """Keep what is needed of arguments and values, now that all is known that the backward may read."""
        trace, inputs = self.trace, self.inputs
        for i, packed in enumerate(self.packed if record.taken_back else ()):
            if packed.made is not None and trace.nodes[packed.made].root in record.taken_back:
                self.direct.pop(i, None)
        waiting = [p for i, p in enumerate(self.packed) if i not in self.direct]
        wanted = {source for p in waiting for source in p.sources}
        trace.settle(wanted, max([p.seen for p in waiting], default=0))
        # Autograd itself reads some arguments (the weight of a matmul): those are there anyway.
        read = self._read_by_autograd()
        for i, tensor in enumerate(inputs.tensors):
            if not trace.opaque and not trace.reads(tensor) and tape_storage(tensor) not in read:
                inputs.drop(i)
        self._prefer_residuals()
        trace.finish(record, flatten(out)[0])
        self.settled = True
        if self.tell is not None:
            trace.tell(self.tell)
        if listening():
            self._report()

    def _read_by_autograd(self) -> set[int]:
        """Storages from outside that are packed."""
        return {p.storage for p in self.packed if p.made is None}

    def _prefer_residuals(self) -> None:
        # Promise 2: never keep more than no remat keeps. Where the inputs are larger than what autograd saves
        # (a reduction, a cast down), the saved values themselves are the better thing to keep.
        inputs = self.inputs
        if self.hoard is not None and self.trace.last >= 0 and not self.trace.higher_order:
            needed = [
                t for t, held in zip(inputs.tensors, inputs.held, strict=True) if isinstance(held, Held)
            ]
            if _bytes(self.hoard) < _bytes(needed) + self.trace.kept_bytes():
                self.direct = {i: Held(t, None) for i, t in enumerate(self.hoard)}
                inputs.held = [Absent(t) for t in inputs.tensors]
                self.trace.settle(())
        self.hoard = None

    def _report(self) -> None:
        name, inputs, nodes = self.region.name, self.inputs, self.trace.nodes
        for i, (tensor, held) in enumerate(zip(inputs.tensors, inputs.held, strict=True)):
            # What an enclosing region is to recompute stays alive no longer than that takes.
            if isinstance(held, Held) and not held.enclosed:
                report(Kept("argument", tensor, name, i))
        for at, node in enumerate(nodes):
            for tensor, away in held_tensors(node.kept):
                report(Kept("policy", tensor, name, at, node.op, node.name, away))
        for i, held in self.direct.items():
            assert held is not None
            made, root = self.packed[i].made, self.root(self.packed[i])
            node = None if root is None else nodes[root]
            # What the recomputation does not read is no longer the node's, and held here alone.
            saved = made is not None and node is not None and SAVE in (nodes[made].verdict, node.verdict)
            why = "captured" if node is None else "policy" if saved else "residual"
            place = i if made is None else made
            kept = Kept(why, held.packed, name, place, node and node.op, node and node.name)
            report(kept)
        for tensor in self.trace.snapshots.values():
            report(Kept("captured", tensor, name, -1))

    def root(self, packed: Packed) -> int | None:
        """The op that made the memory of a packed value, None for memory from outside."""
        root = OUTSIDE if packed.made is None else self.trace.nodes[packed.made].root
        return None if root == OUTSIDE else root

    # -- what later calls may know ---------------------------------------------------------------------

    def lesson(self) -> Plan | None:
        """What this trace tells of the next call with the same signature."""
        trace, inputs = self.trace, self.inputs
        # It holds on to all arguments.
        calls, self.calls = self.calls, None
        if self.ends is not None or not self.metas or self.region.memory.differentiates:
            return None
        # With no dispatch mode around, torch.cond compiles itself, and Dynamo refuses the hooks.
        if trace.higher_order or trace.branches:
            return None
        if self._is_plain():
            calls = None
        elif calls is None or not repeats(trace):
            return None
        # Autograd, or the frame itself, checks what it holds; the rest must be looked after.
        checked = self._read_by_autograd() | trace.arguments
        read = reach(trace, inputs.bindings.near, checked)
        if read is None:
            return None
        absent = frozenset(i for i, held in enumerate(inputs.held) if isinstance(held, Absent))
        try:
            program = calls and Program(trace, calls, len(inputs.tensors), frozenset(self.direct))
        except Unknown:
            return None
        return Plan(len(inputs.bindings.near), read, absent, program)

    def _is_plain(self) -> bool:
        trace = self.trace
        if self.region.selector is not None or not trace.dense:
            return False
        # Without a trace the recomputation ends at the last value packed, whoever made it.
        idle = trace.nodes[trace.end : max(p.seen for p in self.packed)]
        held = all(isinstance(h, Held) for h in self.inputs.held)
        return held and all(traits(n.op).view for n in idle)

    # -- backward --------------------------------------------------------------------------------------

    def unpack(self, handle: Handle) -> torch.Tensor:
        if self.record is not None:
            return self._get_early(handle.at, self.record)
        return self.get(handle.at)

    def _get_early(self, at: int, record: Record) -> torch.Tensor:
        """A value for a backward pass that the function itself runs."""
        if self.alive is not None:
            return self.alive[at]
        value = quiet(self.get, at)
        if (made := self.packed[at].made) is not None:
            record.adopt(value, made)
        for other in recordings():
            # To those around, the value came from nowhere.
            other.trace.opaque = other.trace.opaque or other is not record
        return value

    def fill(self, at: int, task: int) -> None:
        self.part = self._needed()
        self.recompute(task)
        if at not in self.values and self.part is not None:
            # Something else was wanted after all.
            self.part = None
            self.recompute(task)

    def _needed(self) -> set[int] | None:
        """The packed values that the backward under way reads, None for all of them."""
        if self.ends is None or graph_task() == -1:
            return None
        idle = self.ends.idle_now()
        return {i for i, p in enumerate(self.packed) if p.handle() is not None and p.owner not in idle}

    def check_unwritten(self) -> None:
        if self.settled:
            self.trace.check_unwritten(self.region.function)

    def add_modes(self, contexts: list[AbstractContextManager[Any]], args: Any, kwargs: Any) -> None:
        trace, inputs = self.trace, self.inputs
        if trace.generators:
            contexts.append(trace.generators_rewound())
        if self.again:
            self.check_readable()
        elif self.settled and not trace.loose:
            check = self.region.determinism_check != "none"
            part, digest = self._part(), self.region.digest
            contexts.append(trace.fetched(part))
            spend = self.part is None and self.ends is None and self.spends()
            if spend:
                self.spent = self.again = True
            replay = Replay(trace, early_stop=True, check=check, digest=digest, part=part, spend=spend)
            if inputs.ambient.casts:
                replay.uncached = inputs.uncached(split(flatten((args, kwargs))[0])[0])
            contexts.append(replay)

    def _part(self) -> tuple[set[int], int] | None:
        """What to run for the packed values in `self.part`."""
        if self.part is None:
            return None
        packs = [self.packed[i] for i in self.part if i not in self.direct]
        found = self.trace.part({source for p in packs for source in p.sources})
        if found is None:
            self.part = None
            return None
        ops, end = found
        return ops, max([end, *(p.seen for p in packs)])

    def repack(self, tensor: torch.Tensor) -> torch.Tensor:
        at = self.next_packed()
        # An op's own result, packed as it is, would hold on to the op: nothing frees that cycle.
        with unseen(tensor):
            alias = tensor.detach()
        if at not in self.direct and (self.part is None or at in self.part):
            self.check(at, tensor, tensor._version)
            self.values[at] = alias
        if not self.settled and at + 1 == len(self.metas):
            raise Stop
        return alias

    def check_version(self, tensor: torch.Tensor) -> None:
        # The trace knows what was written; a value that is handed out again starts at version zero.
        return


def may_keep_around() -> bool:
    """Whether a region around the call at hand may keep values, which this one must then not recompute."""
    mode = enclosing()
    trace = None if mode is None else mode.trace
    while trace is not None:
        if trace.selective:
            return True
        trace = None if trace.parent is None else trace.parent[0]
    return False


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
        except (NotImplementedError, RuntimeError):
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())
