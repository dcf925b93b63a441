"""The ops of one forward of a region, and which of them run again, given what the backward reads.

`recorder.Record` writes a trace and `replay.Replay` follows it: dispatch modes, which see aten ops below
autograd and below functorch, so that one pair serves plain autograd, `torch.func` at any depth, and graphs
being traced. Which values are kept is a callback's matter (`decide`): nothing here knows of policies.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from remat.transforms.closure import of_captured
from remat.transforms.compat import storage_key
from remat.transforms.context import quiet
from remat.transforms.errors import RematError
from remat.transforms.offload import Elsewhere, Store, away_in
from remat.transforms.ops import Traits, traits, user_line
from remat.transforms.placeholders import numel

if TYPE_CHECKING:
    from remat.transforms.tape.recorder import Record

RECOMPUTE, OFFLOAD, SAVE = 0, 1, 2
RUN, KEPT, SKIP = 0, 1, 2
OUTSIDE = -1


class Stop(BaseException):
    """Ends a recomputation once everything that was asked for is there."""


class Node:
    """One op of a region: where its operands came from, what became of its results."""

    __slots__ = (
        "action",
        "copied",
        "deps",
        "digest",
        "draws",
        "external",
        "graded",
        "kept",
        "name",
        "op",
        "outs",
        "root",
        "shared",
        "verdict",
    )

    op: Any
    deps: list[int]  # nodes whose values, or whose writes, this op reads
    external: tuple[int, ...]  # ids of tensors it reads that come from outside the region
    outs: Any  # results as placeholders can be made of them: metadata, or plain values
    root: int  # the node whose storage the result lives in, OUTSIDE for a view of an outside tensor
    graded: bool  # whether gradients were on
    draws: bool  # whether it advances a random number generator
    verdict: int  # RECOMPUTE, OFFLOAD or SAVE
    kept: Any  # what was saved of it, None when nothing
    shared: bool  # whether a region inside this one reads what was saved
    copied: bool  # whether the recomputation overwrites what was saved, so that it needs a copy
    name: str | None  # its checkpoint_name
    digest: Any  # checksum of its results, for bitwise comparison
    action: int  # RUN, KEPT or SKIP in the recomputation


class Trace:
    """The ops of one run of a region, and after `settle` what its recomputation has to do."""

    def __init__(self, region: str) -> None:
        self.region = region
        self.nodes: list[Node] = []
        self.externals: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}  # object, version, storage
        self.snapshots: dict[int, torch.Tensor] = {}
        self.meta = False  # whether the region itself computes on the meta device
        self.arguments: set[int] = set()  # storages of the region's arguments
        self.inner: list[tuple[int, int]] = []  # the ops of regions inside this one
        self.parent: tuple[Trace, int] | None = None
        self.selective = False  # whether anything may be kept
        self.settled = False  # whether it is decided what each op does
        self.last = -1  # the last op of the recomputation that does anything
        self.end = 0  # how many ops must have passed before all that is wanted has been seen
        self.needed_externals: set[int] = set()
        self.needed_storages: set[int] | None = None
        self.written: dict[int, int] = {}  # nodes whose storage some op writes to, and the last that does
        # Forward-mode derivatives inside: torch leaves out tangents known to be zero, by rules that differ
        # between the passes, so that op sequences cannot be compared. Such a region is recomputed whole.
        self.loose = False
        self.opaque = False  # whether something computed that torch's dispatcher did not see
        self.higher_order = False  # whether an operator on functions is among the ops
        self.branches = False  # whether torch.cond chose some of the ops (`closure.cond`)
        # Sharded parameters are gathered inside, without gradients, and not in both passes (FSDP2's hooks see
        # to it that they are there): what runs without gradients is then left out of the sequence, and
        # nothing is skipped.
        self.sharded = False
        self.generators: dict[torch.Generator, torch.Tensor] = {}  # explicit ones, with their state before
        self.store: Store | None = None  # what was sent to the host, once the forward is over

    def settle(self, wanted: Iterable[int] | None, end: int = 0) -> None:
        """Decide for every op whether it runs again, given the nodes whose values the backward reads.

        None means "not known": then all run. Afterwards only values that are read are held. Autograd saved
        the last of those values when `end` ops had run.
        """
        self.settled = False
        if self.loose:
            for node in self.nodes:
                node.kept = None
            wanted, self.inner, self.parent, self.opaque = None, [], None, True
        self.opaque = self.opaque or self.sharded
        if self.higher_order:
            # An operator such as torch.cond saves what no hook sees, its predicate for one.
            wanted = None
        live = self._reach(range(len(self.nodes)) if wanted is None else wanted)
        self._add_forced(live)
        if any(live.values()) and self._is_opaque(live):
            self.opaque = True
            live = {
                i: node.draws or not self._saved(i)
                for i, node in enumerate(self.nodes)
                if not self.passes(node)
            }
        written = self._written_roots(live)
        for i, node in enumerate(self.nodes):
            if i not in live:
                node.action = SKIP
                self._release(node)
            elif live[i]:
                node.action, self.last = RUN, i
                self.needed_externals.update(node.external)
                self._release(node)
            else:
                # A kept value that a later op of the recomputation overwrites is handed out as a copy.
                node.action, node.copied = KEPT, node.root in written
                self.last = max(self.last, i)
        # Where every op is kept or skipped nothing needs to run up to that point at all.
        if not any(live.values()):
            self.last = -1
        self.end = max(end, self.last + 1)
        self.settled = True

    def part(self, wanted: Iterable[int]) -> tuple[set[int], int] | None:
        """The ops that a backward needs which reads only these values, and where they end; None for all of
        them."""
        if self.loose or self.opaque:
            return None
        live = self._reach(wanted)
        self._add_forced(live)
        if any(live.values()) and self._is_opaque(live):
            return None
        return set(live), max(live, default=-1) + 1

    def _reach(self, wanted: Iterable[int]) -> dict[int, bool]:
        """Nodes the values in `wanted` depend on, up to kept ones: True runs, False is kept."""
        live: dict[int, bool] = {}
        stack = list(wanted)
        while stack:
            i = stack.pop()
            if i in live:
                continue
            if self._saved(i):
                live[i] = False
                continue
            live[i] = True
            stack.extend(self.nodes[i].deps)
        return live

    def _saved(self, i: int) -> bool:
        node = self.nodes[i]
        if self.settled:
            # What a region around this one has begun to keep since then is not handed out here.
            return node.action == KEPT
        if node.root != i and self.written.get(node.root, -1) > i:
            # A view that is handed out would no longer alias what is written through others.
            return False
        if node.kept is not None:
            return True
        if self.parent is None:
            return False
        trace, offset = self.parent
        at = offset + i
        if at >= len(trace.nodes) or trace.nodes[at].kept is None or trace.nodes[at].op is not node.op:
            return False
        # An enclosing region saved it: share its value, and tell it that somebody reads it.
        node.kept = trace.nodes[at].kept
        trace.nodes[at].shared = True
        return True

    def _add_forced(self, live: dict[int, bool]) -> None:
        """Ops that must run although nobody reads them.

        Collectives; draws before a draw that runs; and regions inside this one, which in the recomputation
        run a forward of their own (so that k nested regions run the inner function 1 + k times, as in JAX).
        """
        for start, stop in self.inner:
            live.update((j, r) for j, r in self._reach(range(start, stop)).items() if j not in live)
        if not any(live.values()):
            return
        random = [i for i, n in enumerate(self.nodes) if n.draws]
        last = max((i for i in random if live.get(i)), default=-1)
        forced = [i for i in random if i < last]
        forced += [i for i, n in enumerate(self.nodes) if traits(n.op).outside]
        for i in forced:
            if not live.get(i):
                live.pop(i, None)
                # The node itself runs even when kept, to advance the generator; its operands as usual.
                live.update((j, r) for j, r in self._reach(self.nodes[i].deps).items() if j not in live)
                live[i] = True

    def _is_opaque(self, live: dict[int, bool]) -> bool:
        """Whether a needed value came about unseen: by a raw kernel, or through NumPy.

        A raw kernel (Triton, a pybind extension) fills memory that an `empty` made; what it read is unknown.
        An outside tensor that is gone by now was made inside the region, by something that is no torch op. In
        both cases nothing may be skipped.
        """
        if self.opaque:
            return True
        for i, runs in live.items():
            node = self.nodes[i]
            if traits(node.op).uninitialized and i not in self.written and numel(node.outs):
                return True
            if runs and any(self._made_unseen(key) for key in node.external):
                return True
        return False

    def _made_unseen(self, key: int) -> bool:
        ref, _, where = self.externals[key]
        return ref() is None and where not in self.arguments

    def _written_roots(self, live: dict[int, bool]) -> set[int]:
        return {self.nodes[i].root for i, runs in live.items() if runs and traits(self.nodes[i].op).writes}

    def passes(self, node: Node) -> bool:
        """Whether the op is left out of the sequence (see `sharded`)."""
        return self.sharded and not node.graded

    def _release(self, node: Node) -> None:
        if not node.shared:
            node.kept = None

    @property
    def dense(self) -> bool:
        """Whether running the function up to its last needed op does nothing needless, and writes nothing."""
        return (
            not self.snapshots
            and not self.generators
            and all(n.action == RUN or self.passes(n) or traits(n.op).view for n in self.nodes[: self.end])
        )

    def reads(self, tensor: torch.Tensor) -> bool:
        """Whether the recomputation reads the storage of this outside tensor."""
        if self.needed_storages is None:
            self.needed_storages = {self.externals[key][2] for key in self.needed_externals}
        return storage(tensor) in self.needed_storages

    @contextlib.contextmanager
    def generators_rewound(self) -> Iterator[None]:
        """Put the generators that the region was handed explicitly back to where its forward found them."""
        now = [(generator, generator.get_state()) for generator in self.generators]
        try:
            for generator, state in self.generators.items():
                generator.set_state(state)
            yield
        finally:
            for generator, state in now:
                generator.set_state(state)

    def finish(self, record: Record, outs: Iterable[Any]) -> None:
        """The forward is over, with these results: note what it sent to the host."""
        away = {i: n for i, n in enumerate(self.nodes) if any(True for _ in away_in(n.kept))}
        if not away:
            return
        self.store = Store(away)
        # The caller may write to the results, into memory that is perhaps still being sent.
        roots = {self.nodes[at].root for out in tensors_in(outs) if (at := record.find(out)) is not None}
        for node in away.values():
            if node.root in roots:
                for value in away_in(node.kept):
                    value.parcel.wait()

    @contextlib.contextmanager
    def fetched(self, part: tuple[set[int], int] | None) -> Iterator[None]:
        """Around a recomputation of `part` (see there): what it takes from the host is on its way."""
        if self.store is None:
            yield
            return
        quiet(self.store.begin, part and part[0])
        try:
            yield
        finally:
            self.store.end()

    def kept_bytes(self) -> int:
        """Bytes of the values kept on their device, views of one storage counted once."""
        sizes: dict[int, int] = {}
        for node in self.nodes:
            for tensor in tensors_in(node.kept):
                sizes[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return sum(sizes.values())

    def also_reads(self, storages: set[int]) -> None:
        """Note that autograd itself reads outside tensors with these storages."""
        self.needed_externals.update(
            key for key, (_, _, where) in self.externals.items() if where in storages
        )

    def tell(self, watch: Callable[[torch.Tensor], Any]) -> None:
        """Let whom an enclosing region has set to watch know what is read from outside again."""
        for key in self.needed_externals:
            if (tensor := self.externals[key][0]()) is not None:
                watch(tensor)

    def check_unwritten(self, function: Callable[..., Any]) -> None:
        """Raise when an outside tensor that the recomputation of `function` reads was written to since the
        forward."""
        for key in self.needed_externals:
            ref, version, _ = self.externals[key]
            tensor = ref()
            if tensor is not None and key not in self.snapshots and version_of(tensor) != version:
                raise RematError(written(self.region, tensor, of_captured(function, tensor)))


def written(region: str, tensor: torch.Tensor, path: str | None = None) -> str:
    """The message for a tensor written between forward and backward; `path` is what the user calls it."""
    what = (
        f"`{path}`, a {tuple(tensor.shape)} {tensor.dtype} tensor"
        if path
        else f"a {tuple(tensor.shape)} {tensor.dtype} tensor"
    )
    return (
        f"region {region!r} reads {what} that was written in place between its forward and its backward, so "
        "the recomputation would see another value. Write out of place (`x = x + 1`), pass a `.clone()` "
        "into the region, or run the backward first."
    )


def not_repeated(region: str, what: str) -> str:
    """The message for a recomputation that runs otherwise than its forward did."""
    return (
        f"the recomputation of region {region!r} does not repeat its forward: {what}, at {user_line()}. "
        "(a) The function reads something that changed in between (a global, an attribute, a counter); (b) "
        "it is random in a way torch does not restore (Python's or NumPy's generator); (c) an argument was "
        "changed. Make the function depend on its arguments only."
    )


def targets(facts: Traits, args: Any, kwargs: Any) -> Iterable[torch.Tensor]:
    """The tensors that a call writes to."""
    if facts.conditional is not None and not args[facts.conditional]:
        return
    for where in facts.writes:
        if isinstance(where, str):
            yield from tensors_in(kwargs.get(where))
        elif where < len(args):
            yield from tensors_in(args[where])


def tensors_in(values: Any) -> Iterable[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, (tuple, list)):
                yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(tuple(values.values()))


def held_tensors(kept: Any) -> Iterable[tuple[torch.Tensor, bool]]:
    """The tensors that are held for a kept value, and whether each is an offloaded one, on its host."""
    yield from [(away.host, True) for away in away_in(kept)]
    yield from [(tensor, False) for tensor in tensors_in(kept)]


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (torch.Tensor, Elsewhere)):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)([map_tensors(function, v) for v in value])
    return value


def version_of(tensor: torch.Tensor) -> int:
    # Inference tensors keep no version and cannot be written outside inference mode.
    return 0 if tensor.is_inference() else tensor._version


def storage(tensor: torch.Tensor) -> int:
    """What aliases of one memory have in common."""
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
