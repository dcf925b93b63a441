"""A joint graph as plain data: its ops, its values, and what leads from one to the other; and its forward,
from the tape of a call that has run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat.plan.joint.attention import target_kind
from remat.transforms import Decisions, Meta, map_leaves, metas, span, traits
from remat.transforms.compat import at_hand
from remat.transforms.tape import Node, Ref as TapeRef, Tape, refs_in

# What the names of ops end in that may not run.
OPTIONAL = " by autocast"


Strides = tuple[tuple[int, ...], ...]


def dense(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides with the dimensions in the order of these, without the gaps of a part."""
    found, step = [0] * len(shape), 1
    for at in sorted(range(len(shape)), key=lambda k: (stride[k], -k)):
        found[at] = step
        step *= shape[at]
    return tuple(found)


@dataclass(frozen=True)
class Value:
    """A tensor of the joint graph.

    Attributes:
        shape, dtype, device, stride: its metadata.
        storage: number of its storage; views and in-place results share their base's.
        producer: position of the op that made it, or -1 for inputs.
        origin: "op", "argument", "parameter" (held by somebody else: `nn.Parameter`, captured, or a leaf
            inside a container argument), "elsewhere" (an argument that others hold), "leaf" (one that is a
            leaf, which the graph holds to its end) or "tangent".
        conjugate: whether its numbers are the conjugates of those in its memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    storage: int
    producer: int
    origin: str
    conjugate: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of a dense tensor of this shape."""
        return functools.reduce(lambda a, b: a * b, self.shape, 1) * self.dtype.itemsize


@dataclass(frozen=True)
class Ref:
    """Stands for value `id` in the arguments of a recorded op."""

    id: int


@dataclass(frozen=True)
class Other:
    """Stands for an argument that is no constant: a function of a higher-order operator, a generator."""

    kind: str


# What a recorded op holds as it is. (A symbolic size counts as an int that is not known.)
_CONSTANT = (int, float, complex, bool, str, torch.SymInt, torch.SymFloat, torch.SymBool, type(None))
_CONSTANT += (torch.dtype, torch.device, torch.layout, torch.memory_format)


def noted(leaf: Any) -> Any:
    """What stands for an argument that is no tensor: of a symbol the number at hand."""
    leaf = at_hand(leaf)
    return leaf if isinstance(leaf, _CONSTANT) else Other(type(leaf).__qualname__)


@dataclass(frozen=True)
class Op:
    """One dispatched op.

    Attributes:
        target: the overload (or higher-order operator).
        args, kwargs: its arguments, tensors replaced by `Ref`, what is no constant by `Other`.
        reads, outputs: value numbers; a read of a storage written in place includes the last write.
        mutates: values it wrote over.
        forward: whether it ran before the backward started.
        location: the user's "file:line", empty in the backward.
        optional: whether it is a cast of a weight that autocast may have in its cache, when it does not run.
        node: a number that the backward's ops of one autograd node share.
        beside: values that are there when it begins, and that no op has made: states of generators.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    outputs: tuple[int, ...]
    mutates: tuple[int, ...]
    forward: bool
    location: str
    optional: bool = False
    node: int = field(default=-1, compare=False)
    beside: tuple[int, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """Such as "aten.mm.default"."""
        return f"{self.target}{OPTIONAL if self.optional else ''}"


@dataclass(frozen=True)
class Hole:
    """A call that was left out of a joint graph.

    Attributes:
        forward: how many ops of the graph ran before it.
        backward: how many ops ran before its backward, -1 where that did not run.
        operands: the tensors that it was given, each once, in order.
        cotangents: what its backward was given.
        made: what it returned beside operands, in the order of `Joint.made`.
        present: the places in `made` of results that a gradient came back for.
        gone: the places of those that nothing leads to any more when the forward ends.
    """

    forward: int
    backward: int
    operands: tuple[int, ...]
    cotangents: tuple[int, ...] = ()
    made: tuple[int, ...] = ()
    present: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


@dataclass(frozen=True)
class Joint:
    """Forward and backward of one call.

    Attributes:
        ops: in the order of execution; those with `forward` come first.
        values: every tensor seen.
        storages: bytes of each storage.
        saved: values that autograd packed for the backward, in order, without repetition.
        packed: of each time that it did the value, how many ops had run, and the number of the node.
        results: the function's tensor outputs.
        pinned: storages that nodes hold past all hooks, as those of transforms of torch.func inside do, each
            with the last op while one does. They are there whatever a region keeps.
        made: those that it has made, each once, and what else outlives it, such as a module's attribute.
        shapes: those of `saved` of which nodes read the shape alone, so that an engine in eager code keeps
            nothing for them.
        gradients: the values that the backward ends in, of those inputs that have a gradient.
        differentiated: those inputs, in the same order.
        holes: the calls that were left out, in order.
        held: for each storage the last op while Python held a handle that the forward has made, the number
            of all where it still does, -1 where none did; empty where nobody looked.
        ends: for each storage the last op of the backward while a node held a value that was made there, or
            that it has taken out of what is kept.
        target: the kind of device that tensors without a device are planned for (`target_kind`).
        decides: whether decisions are kept.

    Nothing in it holds a tensor, a module or a function of the user's: joint graphs are kept in caches.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[int, ...]
    saved: tuple[int, ...]
    results: tuple[int, ...]
    gradients: tuple[int, ...] = ()
    differentiated: tuple[int, ...] = ()
    holes: tuple[Hole, ...] = ()
    pinned: tuple[tuple[int, int], ...] = ()
    packed: tuple[tuple[int, int, int], ...] = field(default=(), compare=False)
    made: tuple[int, ...] = ()
    shapes: frozenset[int] = frozenset()
    held: tuple[int, ...] = field(default=(), compare=False)
    ends: tuple[int, ...] = field(default=(), compare=False)
    target: str = field(default_factory=target_kind)
    decides: bool = True

    @functools.cached_property
    def forward(self) -> tuple[Op, ...]:
        """The ops of the forward: what an engine meets, in the order it meets them."""
        return tuple(op for op in self.ops if op.forward)

    @functools.cached_property
    def backward(self) -> tuple[Op, ...]:
        """The ops of the backward."""
        return tuple(op for op in self.ops if not op.forward)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the storages of the forward: ops are of the same shapes where these are the same."""
        met = {self.values[v].storage for op in self.forward for v in (*op.reads, *op.outputs)}
        return tuple([size for s, size in enumerate(self.storages) if s in met])

    @functools.cached_property
    def lies(self) -> tuple[Strides, dict[int, tuple[int, ...]]]:
        """The strides of the gradients that a backward begins with, and of those it ends in, by inputs."""
        begun = tuple([value.stride for value in self.values if value.origin == "tangent"])
        ends = [(v, self.values[g]) for v, g in zip(self.differentiated, self.gradients, strict=True)]
        # Parts of one memory, such as those of what is joined, count once each.
        return begun, {v: dense(g.shape, g.stride) for v, g in ends if 0 not in g.stride}

    @functools.cached_property
    def stored(self) -> tuple[int, ...]:
        """The storages that outlive the call and are no results, such as that of a module's attribute."""
        end, known = len(self.ops), {self.values[v].storage for v in (*self.results, *self.gradients)}
        forward = {s for s, owner in enumerate(self.owner) if owner >= 0 and self.ops[owner].forward}
        return tuple([s for s, at in enumerate(self.held) if at >= end and s in forward - known])

    @functools.cached_property
    def held_by_nodes(self) -> frozenset[int]:
        """The storages that autograd keeps without a region."""
        return frozenset([*[self.values[v].storage for v in self.saved], *dict(self.pinned)])

    @functools.cached_property
    def writers(self) -> dict[int, list[int]]:
        """The ops of the forward that write over each storage. (The kernel of a GRU writes parts of a product
        beside those that are saved.)"""
        found: dict[int, list[int]] = {}
        for at, op in enumerate(self.forward):
            for s in {self.values[v].storage for v in op.mutates}:
                found.setdefault(s, []).append(at)
        return found

    @functools.cached_property
    def decisions(self) -> frozenset[int]:
        """Positions of the forward's ops that an engine keeps in any case."""
        follow, found = Decisions(), set[int]()
        for at, op in enumerate(self.forward if self.decides else ()):
            node = Node()
            node.op, node.optional = op.target, False
            made = [self.values[v] for v in op.outputs]
            node.outs = tuple([Meta((torch.Size(v.shape), v.stride, v.dtype, v.device)) for v in made])
            read = [self.values[v] for v in op.reads]
            sources = [v.producer for v in read if v.producer >= 0 or v.dtype.is_floating_point]
            given = (torch.Size(v.shape).numel() for v in read)
            if follow.meets(at, node, traits(op.target), sources, False, given):
                found.add(at)
        return frozenset(found)

    @functools.cached_property
    def flops(self) -> dict[int, float]:
        """What is known of its ops' FLOPs, by identity."""
        return {}

    @functools.cached_property
    def producers(self) -> dict[int, Op]:
        """The op that made each value; inputs have none."""
        return {output: op for op in self.ops for output in op.outputs}

    @functools.cached_property
    def readers(self) -> dict[int, tuple[Op, ...]]:
        """The ops that read each value."""
        found: dict[int, list[Op]] = {}
        for op in self.ops:
            for read in op.reads:
                found.setdefault(read, []).append(op)
        return {value: tuple(ops) for value, ops in found.items()}

    @functools.cached_property
    def family(self) -> tuple[tuple[int, ...], ...]:
        """The values on each storage, oldest first; none on one that has become another's."""
        found: list[list[int]] = [[] for _ in self.storages]
        for number, value in enumerate(self.values):
            found[value.storage].append(number)
        return tuple(map(tuple, found))

    @functools.cached_property
    def owner(self) -> tuple[int, ...]:
        """The position of the op that allocated each storage, -1 for those of inputs."""
        return tuple(self.values[members[0]].producer if members else -1 for members in self.family)


def learned(tape: Tape, held: tuple[bool, ...] = ()) -> Joint:
    """What the ops on `tape` were, for a planner; `held`: which arguments somebody else holds.

    There is no backward in it: what autograd saved is on the tape.
    """
    return _Reading(tape, held).joint()


class _Reading:
    """One reading of a tape. What it numbers -1, -2, ... comes first here, then the results of ops."""

    def __init__(self, tape: Tape, held: tuple[bool, ...]) -> None:
        self.tape = tape
        self.values: list[Value] = []
        self.storages: list[int] = []
        self.place: dict[int, int] = {}  # the value for each number on the tape
        self.memory: dict[int, int] = {}  # the storage for each root
        # What an op that writes makes of memories: values for those who read them later.
        self.written: dict[int, list[int]] = {}
        for at, outside in enumerate(tape.outside):
            mine = at < tape.arguments and not (at < len(held) and held[at])
            origin, known = "argument" if mine else "parameter", self.memory.get(outside.root)
            self.place[-1 - at] = self._add(outside.meta, -1, origin, known)
            self.memory[outside.root] = self.values[-1].storage

    def joint(self) -> Joint:
        ops: list[Op] = []
        for at, node in enumerate(self.tape.nodes):
            if at in self.tape.bookkeeping:
                self._given(node)
            else:
                ops.append(self._op(at, len(ops), node))
        saved: dict[int, None] = {}
        for number, position in self.tape.saved_values:
            writes = [v for at in self.tape.sources(number, position) for v in self.written.get(at, ())]
            saved |= dict.fromkeys([self.place[number], *writes])
        return Joint(tuple(ops), tuple(self.values), tuple(self.storages), tuple(saved), ())

    def _add(self, meta: Any, producer: int, origin: str, storage: int | None = None) -> int:
        """A new value, in this storage or in one of its own."""
        shape, stride, dtype, device = meta
        if storage is None:
            storage = len(self.storages)
            size = torch.Size(shape).numel() if stride is None else span(shape, stride)
            self.storages.append(size * dtype.itemsize)
        self.values.append(Value(tuple(shape), dtype, device, tuple(stride or ()), storage, producer, origin))
        return len(self.values) - 1

    def _given(self, node: Node) -> None:
        """What wrappers of modules bring there: parameters that they have gathered."""
        for count, meta in enumerate(metas(node.outs)):
            value = self._add(meta, -1, "parameter", self.memory.get(node.root))
            self.place[node.first + count] = value
            self.memory.setdefault(node.root, self.values[value].storage)

    def _op(self, at: int, place: int, node: Node) -> Op:
        """Op `at` of the tape, the one at `place` here."""
        tape, values = self.tape, self.values
        template = node.args, node.kwargs
        numbers = refs_in(template)
        reads = {self.place[number] for number in numbers}
        reads |= {value for dep in node.deps for value in self.written.get(dep, ())}
        storage = None
        if node.root != at:
            # Of an op with several results, the memory of the one that is looked at.
            bases = (values[self.place[n]].storage for n in numbers if tape.root_of(n) == node.root)
            storage = next(bases, self.memory.get(node.root))
        overwritten = [self.place[n] for n in numbers if tape.root_of(n) in node.written]
        outputs = []
        for count, meta in enumerate(metas(node.outs)):
            outputs.append(self._add(meta, place, "op", storage))
            self.place[node.first + count] = outputs[-1]
            self.memory.setdefault(node.root, values[-1].storage)
        for old in overwritten:
            if not any(values[o].storage == values[old].storage for o in outputs):
                outputs.append(len(values))
                values.append(replace(values[old], producer=place, origin="op"))
        if node.written:
            self.written[at] = outputs
        args, kwargs = map_leaves(self._noted, template)
        made = node.op, args, kwargs, tuple(sorted(reads)), tuple(outputs), tuple(overwritten), True, ""
        return Op(*made, optional=node.optional and not traits(node.op).view)

    def _noted(self, leaf: Any) -> Any:
        if type(leaf) is TapeRef:
            return Ref(self.place[leaf])
        return noted(leaf)
