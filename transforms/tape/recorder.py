"""Writing down the ops of a region's forward, and keeping what a policy says."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from remat.transforms.compat import below_levels, memory_is_real, storage_key
from remat.transforms.context import Mode, active, quiet
from remat.transforms.errors import RematError
from remat.transforms.offload import Away, away_in, send
from remat.transforms.ops import Traits, draws, is_shape_arithmetic, traits, user_line
from remat.transforms.placeholders import Meta, metadata, metas
from remat.transforms.tape.tape import (
    OUTSIDE,
    RECOMPUTE,
    RUN,
    SAVE,
    Node,
    Trace,
    map_tensors,
    storage,
    targets,
    tensors_in,
    version_of,
)
from remat.transforms.tape.values import Makers


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
        self.calls: Any = None  # a `tape.values.Calls` to write down how each op is called, or None
        self.kept_bytes = 0
        self._made = Makers()
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

    records = True

    @property
    def position(self) -> int:
        return len(self.trace.nodes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if active.quiet:
            return func(*args, **kwargs)
        facts = traits(func)
        if facts.ignored or (not self.trace.meta and is_shape_arithmetic(args)):
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
        if func is torch.ops.aten._new_zeros_with_same_feature_meta.default:
            # Memory of its own, which a tangent is then copied into.
            self.trace.loose = True
            self._add(func, traits(func), args, kwargs, out)
            return out
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

    def _add(self, func: Any, facts: Traits, args: Any, kwargs: Any, out: Any) -> None:
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
        node.draws = facts.random and draws(func, args, kwargs)
        node.outs = metadata(out)
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
        asked = not facts.writes or facts.conditional is not None
        if self.selector is not None and asked and not active.unasked:
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
        return quiet(map_tensors, lambda tensor: send(tensor, root), out)

    def owner(self, node: Node, value: torch.Tensor) -> int | None:
        """The op whose whole result lies in the memory of `value`, the result of `node`, if there is one."""
        at = node.root
        if at == OUTSIDE or at in self._writers or self.trace.nodes[at] is node or value.storage_offset():
            return None
        # Size.numel() would make numbers of symbolic sizes, for which the graph then holds alone.
        outs = [m for m in metas(self.trace.nodes[at].outs) if math.prod(m[0]) == value.numel()]
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
        if verdict != RECOMPUTE and isinstance(node.outs, Meta):
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
            with below_levels():
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

    def origin(self, tensor: torch.Tensor) -> int | None:
        """The node whose result autograd saved when it saved `tensor`; None for a tensor from outside.

        A look at a tensor from outside is that tensor, unless it was sent to the host; and then it is only
        where it is the look that was saved: at one address lie the tensor itself and others' looks at it.
        """
        at = self.find(tensor)
        if at is None or self.trace.passes(self.trace.nodes[at]):
            return None
        if self.trace.nodes[at].root != OUTSIDE:
            return at
        return at if self._made.get(tensor) is not None and self._is_sent(at) else None

    def _is_sent(self, at: int) -> bool:
        """Whether node `at` is, or looks at, an alias of a tensor from outside that was sent to the host."""
        if self._outside_writers:
            return False
        node = self.trace.nodes[at]
        while not isinstance(node.kept, Away) and node.deps:
            node = self.trace.nodes[node.deps[0]]
        return isinstance(node.kept, Away)

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
            self.trace.externals[key] = (weakref.ref(tensor), version_of(tensor), storage(tensor))
        return key

    def _is_external(self, tensor: torch.Tensor) -> bool:
        known = self.trace.externals.get(self._keys.get(id(tensor), id(tensor)))
        return known is not None and (known[0]() is tensor or known[2] == storage(tensor))

    def _root(self, values: Any) -> int:
        first = next(iter(tensors_in(values)), None)
        at = None if first is None else self._made.get(first)
        return OUTSIDE if at is None else self.trace.nodes[at].root

    def _note_writes(self, at: int, facts: Traits, args: Any, kwargs: Any) -> int:
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

    def _before_write(self, func: Any, facts: Traits, args: Any, kwargs: Any) -> None:
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
        if traits(func).outside:
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
                for away in away_in(node.kept):
                    away.parcel.wait()

    def _refuse_write(self, func: Any, tensor: torch.Tensor, how: str) -> str:
        return (
            f"region {self.trace.region!r} writes with {func} at {user_line()} into a "
            f"{tuple(tensor.shape)} {tensor.dtype} tensor from outside the region, {how}. A recomputation "
            "would write again. Write out of place, or into a `.clone()` made inside the region."
        )


def _address(tensor: torch.Tensor) -> int:
    if not memory_is_real():
        return storage(tensor)
    try:
        return tensor.data_ptr() or id(tensor)
    except RuntimeError:
        # Fake and functional tensors have storages but no data; wrapper subclasses have neither.
        return storage_key(tensor)
