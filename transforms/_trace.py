"""Watching a region's ops in its forward, and running again only those that the backward reads.

`Record` and `Replay` are dispatch modes. They see aten ops below autograd and below functorch, so one pair
serves plain autograd, `torch.func` at any depth, and graphs being traced. Which values are kept is a
callback's matter (`decide`): nothing here knows of policies.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from remat.transforms import _blanks, _offload, _ops, _paths, _torch
from remat.transforms._errors import RematError

RECOMPUTE, OFFLOAD, SAVE = 0, 1, 2
RUN, KEPT, SKIP = 0, 1, 2
OUTSIDE = -1


class _Active(threading.local):
    """What is going on in this thread. (A bare threading.local is slow to say that it lacks something.)"""

    stack: Any = ()
    quiet = False


_active = _Active()


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
        # Sharded parameters are gathered inside, without gradients, and not in both passes (FSDP2's hooks see
        # to it that they are there): what runs without gradients is then left out of the sequence, and
        # nothing is skipped.
        self.sharded = False
        self.generators: dict[torch.Generator, torch.Tensor] = {}  # explicit ones, with their state before
        self.store: _offload.Store | None = None  # what was sent to the host, once the forward is over

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
        forced += [i for i, n in enumerate(self.nodes) if _ops.traits(n.op).outside]
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
            if _ops.traits(node.op).uninitialized and i not in self.written and _blanks.numel(node.outs):
                return True
            if runs and any(self._made_unseen(key) for key in node.external):
                return True
        return False

    def _made_unseen(self, key: int) -> bool:
        ref, _, where = self.externals[key]
        return ref() is None and where not in self.arguments

    def _written_roots(self, live: dict[int, bool]) -> set[int]:
        return {
            self.nodes[i].root for i, runs in live.items() if runs and _ops.traits(self.nodes[i].op).writes
        }

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
            and all(
                n.action == RUN or self.passes(n) or _ops.traits(n.op).view for n in self.nodes[: self.end]
            )
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
        away = {i: n for i, n in enumerate(self.nodes) if any(True for _ in _offload.away_in(n.kept))}
        if not away:
            return
        self.store = _offload.Store(away)
        # The caller may write to the results, into memory that is perhaps still being sent.
        roots = {self.nodes[at].root for out in tensors_in(outs) if (at := record.find(out)) is not None}
        for node in away.values():
            if node.root in roots:
                for value in _offload.away_in(node.kept):
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
                sizes[_torch.storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return sum(sizes.values())

    def also_reads(self, storages: set[int]) -> None:
        """Note that autograd itself reads outside tensors with these storages."""
        self.needed_externals.update(
            key for key, (_, _, where) in self.externals.items() if where in storages
        )

    def check_unwritten(self, function: Callable[..., Any]) -> None:
        """Raise when an outside tensor that the recomputation of `function` reads was written to since the
        forward."""
        for key in self.needed_externals:
            ref, version, _ = self.externals[key]
            tensor = ref()
            if tensor is not None and key not in self.snapshots and _version(tensor) != version:
                raise RematError(written(self.region, tensor, _paths.of_captured(function, tensor)))


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
        f"the recomputation of region {region!r} does not repeat its forward: {what}, at {_ops.user_line()}. "
        "(a) The function reads something that changed in between (a global, an attribute, a counter); (b) "
        "it is random in a way torch does not restore (Python's or NumPy's generator); (c) an argument was "
        "changed. Make the function depend on its arguments only."
    )


class Mode(_torch.DispatchMode):
    """Shared by recording and replaying: a stack of those active, and silence for the engine's own ops."""

    # Under autocast torch caches casts of leaves, across regions: whether such a cast happens in a forward
    # and in its recomputation is chance. They are left out of the sequence. The ids of arguments that torch
    # does not cache.
    uncached: set[int] | None = None

    def _cached_cast(self, func: Any, args: Any) -> bool:
        if self.uncached is None or func is not torch.ops.aten._to_copy.default:
            return False
        return args[0].is_leaf and args[0].requires_grad and id(args[0]) not in self.uncached

    trace: Trace

    def __enter__(self) -> Any:
        stack = _active.__dict__.setdefault("stack", [])
        self.trace.parent = self.trace.parent or self._link(stack)
        stack.append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> Any:
        _active.stack.pop()
        return super().__exit__(*exc)

    @staticmethod
    def _link(stack: list[Any]) -> tuple[Trace, int] | None:
        return (stack[-1].trace, stack[-1].position) if stack else None

    @property
    def position(self) -> int:
        raise NotImplementedError


def enclosing() -> Mode | None:
    """The innermost recording or replaying in progress on this thread."""
    stack = _active.stack
    return stack[-1] if stack else None


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Tell the enclosing recording, if any, that what runs now is a region of its own."""
    mode = enclosing()
    if not isinstance(mode, Record):
        yield
        return
    start = mode.position
    yield
    mode.trace.inner.append((start, mode.position))


def recordings() -> list[Record]:
    """The recordings in progress on this thread, outermost first."""
    return [mode for mode in _active.stack if isinstance(mode, Record)]


def around(mode: Mode) -> Mode | None:
    """What records or replays around `mode`."""
    stack = _active.stack
    at = next((i for i, other in enumerate(stack) if other is mode), 0)
    return stack[at - 1] if at else None


def is_quiet() -> bool:
    """Whether an op of the engine's own runs."""
    return _active.quiet


def quiet(function: Callable[..., Any], *args: Any) -> Any:
    """Run an op of the engine's own, which no recording counts."""
    before = _active.quiet
    _active.quiet = True
    try:
        return function(*args)
    finally:
        _active.quiet = before


class Record(Mode):
    """Writes down the ops of a region and keeps what `decide` says.

    Args:
        trace: where to write.
        selector: its `decide(index, node, args, kwargs, outs)` says RECOMPUTE, OFFLOAD or SAVE; or None.
        inputs: the region's argument tensors (which it must not write to).
        digest: a checksum of an op's results to compare bitwise later, or None.
    """

    def __init__(
        self,
        trace: Trace,
        selector: Any,
        inputs: Iterable[torch.Tensor] = (),
        digest: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self.trace = trace
        self.selector = selector
        trace.selective = selector is not None
        trace.arguments = {storage(t) for t in inputs}
        trace.meta = any(t.is_meta for t in inputs)
        self.digest = digest
        self.calls: Any = None  # a `_values.Calls` to write down how each op is called, or None
        self.kept_bytes = 0
        self._made = _Makers()
        self._keys: dict[int, int] = {}  # outside tensors whose id another one had before
        self._by_address: dict[int, int] = {}
        self._by_storage: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}
        self._outside_writers: dict[int, list[int]] = {}
        self._kept_roots: set[int] = set()
        self.taken_back: set[int] = set()  # roots of values that were kept until they had a name
        self._cast: dict[
            int, torch.Tensor
        ] = {}  # outside tensors by the ids of their aliases and cached casts
        self._alive: list[torch.Tensor] = []

    @property
    def position(self) -> int:
        return len(self.trace.nodes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _active.quiet:
            return func(*args, **kwargs)
        facts = _ops.traits(func)
        if facts.ignored or (not self.trace.meta and _ops.is_shape_arithmetic(args)):
            return self._pass(func, args, kwargs)
        if self.uncached is not None and self._cached_cast(func, args):
            return self._pass(func, args, kwargs)
        if facts.writes:
            self._before_write(func, facts, args, kwargs)
        if facts.random and (generator := kwargs.get("generator")) is not None:
            if generator not in self.trace.generators:
                self.trace.generators[generator] = generator.get_state()
        out = func(*args, **kwargs)
        self._add(func, facts, args, kwargs, out)
        return out

    def _pass(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that is left out of the sequence; what it returns stands for its operand."""
        out = func(*args, **kwargs)
        if func is torch.ops.aten._has_same_storage_numel.default:
            self.trace.loose = True
        first = next(iter(tensors_in(args)), None)
        if isinstance(out, torch.Tensor) and first is not None and out is not first:
            if self.calls is not None:
                self.calls.values.same(func, args, out)
            at = self._made.get(first)
            if at is not None:
                self._made.set(out, at)
            else:
                self._external(first)
                self._cast[id(out)] = self._cast.get(id(first), first)
                self._alive.append(out)
        return out

    def _add(self, func: Any, facts: _ops.Traits, args: Any, kwargs: Any, out: Any) -> None:
        nodes = self.trace.nodes
        at = len(nodes)
        node = Node()
        node.op, node.name, node.digest, node.kept = func, None, None, None
        node.verdict, node.action, node.shared, node.copied = RECOMPUTE, RUN, False, False
        self._link_operands(node, () if facts.shape_only else args, kwargs)
        # A look at what was made without gradients belongs to it.
        node.graded = torch.is_grad_enabled() and not (
            facts.view
            and node.deps
            and not any([nodes[i].graded for i in node.deps])
            and not any([t.requires_grad for t in tensors_in(args)])
        )
        if facts.outside and not node.graded:
            self.trace.sharded = True
        if facts.higher_order:
            self.trace.higher_order = True
        node.root = at
        if facts.view:
            node.root = self._root(args)
        elif facts.writes:
            node.root = self._note_writes(at, facts, args, kwargs)
        node.draws = facts.random and _ops.draws(func, args, kwargs)
        node.outs = _blanks.metadata(out)
        if self.calls is not None:
            self.calls.add(args, kwargs, out)
        nodes.append(node)
        for tensor in tensors_in(out):
            self._made.set(tensor, at)
            self._by_address[_address(tensor)] = at
            self._by_storage[storage(tensor)] = at
        if self.digest is not None and not facts.uninitialized:
            node.digest = quiet(self.digest, out)
        # What an op wrote in place is handed to its caller by reference, so it cannot be kept in its stead.
        if self.selector is not None and (not facts.writes or facts.conditional is not None):
            self.judge(node, self.selector.decide(at, node, args, kwargs, out), out)

    def judge(self, node: Node, verdict: int, out: Any) -> None:
        """Keep `out` for `node`, or forget it, as the verdict says."""
        node.verdict = verdict
        if verdict == RECOMPUTE:
            node.kept = None
        elif node.kept is None:
            node.kept = self._hold(node, verdict, out)
            if verdict == SAVE:
                self._kept_roots.add(node.root)
                self.kept_bytes += sum(t.numel() * t.element_size() for t in tensors_in(out))

    def _hold(self, node: Node, verdict: int, out: Any) -> Any:
        """What is kept of an op's results under this verdict, SAVE or OFFLOAD."""
        if verdict == SAVE:
            return quiet(map_tensors, torch.Tensor.detach, out)
        # Of memory that was written to since, what was sent is out of date.
        fresh = node.root == OUTSIDE or node.root in self._writers
        root = None if fresh else self.trace.nodes[node.root].kept
        return quiet(map_tensors, lambda tensor: _offload.send(tensor, root), out)

    def owner(self, node: Node, value: torch.Tensor) -> int | None:
        """The op whose whole result lies in the memory of `value`, the result of `node`, if there is one."""
        at = node.root
        if at == OUTSIDE or at in self._writers or self.trace.nodes[at] is node or value.storage_offset():
            return None
        outs = [m for m in _blanks.metas(self.trace.nodes[at].outs) if m[0].numel() == value.numel()]
        return at if any(m[2] is value.dtype for m in outs) else None

    def judge_again(self, at: int, verdict: int, value: torch.Tensor) -> None:
        """Change what is kept of op `at` and of the views of its result, all of which `value` is."""
        node = self.trace.nodes[at]
        for other in self.trace.nodes[at:]:
            if other.root == at and (verdict != SAVE or other is node):
                other.kept, other.verdict = None, RECOMPUTE
        self._kept_roots.discard(at)
        # Autograd may have packed it in the meantime, as something that is kept anyway.
        self.taken_back.add(at)
        if verdict != RECOMPUTE and isinstance(node.outs, _blanks.Meta):
            shape, stride = node.outs[:2]
            same = value.shape == shape and value.stride() == stride
            self.judge(node, verdict, value if same else quiet(torch.as_strided, value, shape, stride, 0))
        elif verdict != RECOMPUTE and (made := self._made.get(value)) is not None:
            # The op's other results are gone: what the name speaks of is kept alone.
            self.judge(self.trace.nodes[made], verdict, value)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Name the value `tensor`, which an op of its own made."""
        at = self._made.get(tensor)
        if at is None:
            return
        node = self.trace.nodes[at]
        node.name = name
        if self.selector is not None:
            # The user's code runs above the levels, what is kept belongs below them.
            with _torch.below_levels():
                self.selector.name(self, at, tensor, name)
        elif (owner := self.owner(node, tensor)) is not None:
            # An enclosing region may keep it, and share it.
            self.trace.nodes[owner].name = name

    def adopt(self, tensor: torch.Tensor, at: int) -> None:
        """Take `tensor` for the result of op `at`, of which it is a recomputed copy."""
        self._by_storage[storage(tensor)] = at

    def find(self, tensor: torch.Tensor) -> int | None:
        """The node that made `tensor` or an alias of it, None for one from outside."""
        at = self._made.get(tensor)
        return self._by_address.get(_address(tensor)) if at is None else at

    def sources(self, at: int) -> tuple[int, ...]:
        """Node `at` and what has written into its memory since: what its value at this point takes."""
        if not self._writers:
            return (at,)
        return at, *[i for i in self._writers.get(self.trace.nodes[at].root, ()) if i > at]

    def from_outside(self, at: int) -> bool:
        """Whether node `at` only looks at a tensor from outside, of which nothing was sent to the host."""
        node = self.trace.nodes[at]
        return self.trace.passes(node) or (node.root == OUTSIDE and not self._is_sent(at))

    def _is_sent(self, at: int) -> bool:
        """Whether node `at` is, or looks at, an alias of a tensor from outside that was sent to the host."""
        if self._outside_writers:
            return False
        node = self.trace.nodes[at]
        while not isinstance(node.kept, _offload.Away) and node.deps:
            node = self.trace.nodes[node.deps[0]]
        return isinstance(node.kept, _offload.Away)

    def shares_kept(self, at: int) -> bool:
        """Whether node `at` only looks into a storage that is kept on this device and never written."""
        root = self.trace.nodes[at].root
        if root in self._writers or root == OUTSIDE:
            return False
        return root in self._kept_roots

    def _link_operands(self, node: Node, args: Any, kwargs: Any) -> None:
        deps: list[int] = []
        external: list[int] = []
        for tensor in tensors_in((*args, *kwargs.values()) if kwargs else args):
            if self._cast:
                tensor = self._cast.get(id(tensor), tensor)
            at = self._maker(tensor)
            if at is None:
                external.append(self._external(tensor))
                writers = self._outside_writers.get(id(tensor)) if self._outside_writers else None
            else:
                deps.append(at)
                writers = self._writers.get(self.trace.nodes[at].root) if self._writers else None
            if writers:
                deps.extend(writers)
        node.deps, node.external = deps, tuple(external)

    def _maker(self, tensor: torch.Tensor) -> int | None:
        """The node that made this tensor object, or at least its storage."""
        at = self._made.get(tensor)
        if at is None and not self._is_external(tensor):
            # Autograd makes aliases that no dispatch mode sees. An address used twice only adds a dependency.
            at = self._by_storage.get(storage(tensor))
        return at

    def _external(self, tensor: torch.Tensor) -> int:
        key = self._keys.get(id(tensor), id(tensor))
        known = self.trace.externals.get(key)
        if known is not None and known[0]() is not tensor and known[2] != storage(tensor):
            key = self._keys[id(tensor)] = -1 - len(self.trace.externals)
            known = None
        if known is None:
            self.trace.externals[key] = (weakref.ref(tensor), _version(tensor), storage(tensor))
        return key

    def _is_external(self, tensor: torch.Tensor) -> bool:
        known = self.trace.externals.get(self._keys.get(id(tensor), id(tensor)))
        return known is not None and (known[0]() is tensor or known[2] == storage(tensor))

    def _root(self, values: Any) -> int:
        first = next(iter(tensors_in(values)), None)
        at = None if first is None else self._made.get(first)
        return OUTSIDE if at is None else self.trace.nodes[at].root

    def _note_writes(self, at: int, facts: _ops.Traits, args: Any, kwargs: Any) -> int:
        root = at
        for tensor in targets(facts, args, kwargs):
            made = self._made.get(tensor)
            if made is None:
                self._outside_writers.setdefault(id(tensor), []).append(at)
            else:
                written = self.trace.nodes[made].root
                self._writers.setdefault(written, []).append(at)
                self.trace.written[written] = at
            if facts.inplace:
                root = self._root(tensor)
        return root

    def _before_write(self, func: Any, facts: _ops.Traits, args: Any, kwargs: Any) -> None:
        if self.trace.sharded and not torch.is_grad_enabled():
            return
        for tensor in targets(facts, args, kwargs):
            at = self._made.get(tensor)
            if at is None:
                self._write_outside(func, tensor)
            elif self.trace.nodes[at].root != OUTSIDE:
                self._copy_on_write(self.trace.nodes[at].root)
            elif not facts.outside:
                raise RematError(self._refuse_write(func, tensor, "through a view"))

    def _write_outside(self, func: Any, tensor: torch.Tensor) -> None:
        if _ops.traits(func).outside:
            return
        if storage(tensor) in self.trace.arguments:
            raise RematError(self._refuse_write(func, tensor, "which is an argument"))
        if id(tensor) not in self.trace.snapshots:
            # The state before the write, so that the recomputation can repeat it on a copy and the outside
            # sees the write once.
            self._external(tensor)
            self.trace.snapshots[id(tensor)] = quiet(torch.clone, tensor)

    def _copy_on_write(self, root: int) -> None:
        for node in self.trace.nodes[root:]:
            if node.root == root and node.kept is not None and node.verdict == SAVE:
                node.kept = quiet(map_tensors, torch.clone, node.kept)
            elif node.root == root:
                for away in _offload.away_in(node.kept):
                    away.parcel.wait()

    def _refuse_write(self, func: Any, tensor: torch.Tensor, how: str) -> str:
        return (
            f"region {self.trace.region!r} writes with {func} at {_ops.user_line()} into a "
            f"{tuple(tensor.shape)} {tensor.dtype} tensor from outside the region, {how}. A recomputation "
            "would write again. Write out of place, or into a `.clone()` made inside the region."
        )


class _Makers:
    """Which node made a tensor. An id is reused once its tensor is gone, so each entry knows its own."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def get(self, tensor: torch.Tensor) -> int | None:
        found = self._at.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def set(self, tensor: torch.Tensor, at: int) -> None:
        self._at[id(tensor)] = weakref.ref(tensor), at


class Replay(Mode):
    """Runs a region again: needed ops run, kept values are handed out, all else is skipped.

    Args:
        trace: a settled trace.
        early_stop: raise `Stop` at the first op after the last needed one; otherwise ops beyond that end
            pass through unseen (they belong to the backward).
        check: compare shape, dtype and device of what runs.
        digest: as for `Record`.
        part: skip what is not in this part of the trace (see `Trace.part`).
        spend: let go of kept values as they are handed out: nobody will ask again.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        early_stop: bool,
        check: bool = True,
        digest: Any = None,
        part: tuple[set[int], int] | None = None,
        spend: bool = False,
    ) -> None:
        super().__init__()
        self.trace, self.spend = trace, spend
        self.needed, self.end = part or (None, trace.end)
        self.early_stop = early_stop
        self.check = check
        self.digest = digest
        self.position_ = 0
        # Outside of a frame the nodes that are made of this run are for real, and storages tell them apart.
        self.blanks = _blanks.Shared() if early_stop else _blanks.Separate()
        self._scratch = {key: quiet(torch.clone, t) for key, t in trace.snapshots.items()}

    @property
    def position(self) -> int:
        return self.position_

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = _ops.traits(func)
        if _active.quiet or facts.ignored:
            return func(*args, **kwargs)
        if not self.trace.meta and _ops.is_shape_arithmetic(args):
            return func(*args, **kwargs)
        if self.uncached is not None and self._cached_cast(func, args):
            return func(*args, **kwargs)
        if self.trace.sharded:
            if not torch.is_grad_enabled():
                return func(*args, **kwargs)
            self._pass_by()
        at = self.position_
        if self.early_stop and at >= self.end:
            raise Stop
        if at >= len(self.trace.nodes):
            return func(*args, **kwargs)
        self.position_ = at + 1
        node = self.trace.nodes[at]
        if node.op is not func:
            raise RematError(self._differs(at, f"the forward ran {node.op}, the recomputation runs {func}"))
        if self._scratch:
            args, kwargs = _swap((args, kwargs), self._scratch)
        if self.needed is None or at in self.needed:
            if node.action == RUN:
                return self._run(at, node, func, args, kwargs)
            if node.action == KEPT:
                out = _hand_out(node)
                if self.spend:
                    node.kept = None
                return out
        if facts.reshapes or (facts.view and node.root in self.trace.written):
            # `squeeze_` and the like change the tensor object itself, which later ops look at. A view that is
            # written through tells autograd, by its offset, where in its base the gradient belongs.
            return func(*args, **kwargs)
        if facts.inplace:
            return next(iter(targets(facts, args, kwargs)))
        return quiet(self.blanks, node.outs)

    def _pass_by(self) -> None:
        nodes = self.trace.nodes
        while self.position_ < len(nodes) and self.trace.passes(nodes[self.position_]):
            self.position_ += 1

    def forward_done(self) -> None:
        """What follows belongs to the backward."""
        if self.position_ < self.end:
            raise RematError(
                self._differs(
                    self.position_,
                    f"the recomputation ends where the forward ran {self.trace.nodes[self.position_].op}",
                )
            )
        self.position_ = len(self.trace.nodes)

    def _run(self, at: int, node: Node, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if self.check and not _blanks.alike(_blanks.metadata(out), node.outs):
            raise RematError(
                self._differs(
                    at, f"{func} made {node.outs} in the forward and now makes {_blanks.metadata(out)}"
                )
            )
        if node.digest is not None and quiet(self.digest, out) != node.digest:
            raise RematError(self._differs(at, f"{func} gave other numbers than in the forward, bit for bit"))
        return out

    def _differs(self, at: int, what: str) -> str:
        return not_repeated(self.trace.region, f"at op {at}, {what}")


def targets(facts: _ops.Traits, args: Any, kwargs: Any) -> Iterable[torch.Tensor]:
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


def held_tensors(kept: Any) -> Iterable[torch.Tensor]:
    """The tensors that are held for a kept value, where they are: an offloaded one on its host."""
    yield from [away.host for away in _offload.away_in(kept)]
    yield from tensors_in(kept)


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (torch.Tensor, _offload.Elsewhere)):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)([map_tensors(function, v) for v in value])
    return value


def _hand_out(node: Node) -> Any:
    def fresh(value: Any) -> torch.Tensor:
        if isinstance(value, _offload.Away):
            return value.get(alone=node.copied)
        # A new tensor object each time: autograd writes its own record on it.
        return value.clone() if node.copied else value.detach()

    return quiet(map_tensors, fresh, node.kept)


def _swap(tree: Any, table: dict[int, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return table.get(id(tree), tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)([_swap(v, table) for v in tree])
    if isinstance(tree, dict):
        return {k: _swap(v, table) for k, v in tree.items()}
    return tree


def _version(tensor: torch.Tensor) -> int:
    # Inference tensors keep no version and cannot be written outside inference mode.
    return 0 if tensor.is_inference() else tensor._version


def storage(tensor: torch.Tensor) -> int:
    """What aliases of one memory have in common."""
    try:
        return _torch.storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _address(tensor: torch.Tensor) -> int:
    if not _torch.memory_is_real():
        return storage(tensor)
    try:
        return tensor.data_ptr() or id(tensor)
    except RuntimeError:
        # Fake and functional tensors have storages but no data; wrapper subclasses have neither.
        return _torch.storage_key(tensor)
