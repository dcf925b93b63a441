"""A joint graph as plain data: its ops, its values, and what leads from one to the other."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from remat.transforms.ops import traits
from remat.transforms.placeholders import Meta
from remat.transforms.tape import Decisions, Node

# What the names of ops end in that may not run.
OPTIONAL = " by autocast"


@dataclass(frozen=True)
class Value:
    """A tensor of the joint graph.

    Attributes:
        shape, dtype, device, stride: its metadata.
        storage: number of its storage; views and in-place results share their base's.
        producer: position of the op that made it, or -1 for inputs.
        origin: "op", "argument", "parameter" (held by somebody else: `nn.Parameter`, captured, or a leaf
            inside a container argument) or "tangent".
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    storage: int
    producer: int
    origin: str

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

    @property
    def name(self) -> str:
        """Such as "aten.mm.default"."""
        return f"{self.target}{OPTIONAL if self.optional else ''}"


@dataclass(frozen=True)
class Joint:
    """Forward and backward of one call.

    Attributes:
        ops: in the order of execution; those with `forward` come first.
        values: every tensor seen.
        storages: bytes of each storage.
        saved: values that autograd packed for the backward, in order, without repetition.
        results: the function's tensor outputs.
        gradients: the values that the backward ends in, of those inputs that have a gradient.
        differentiated: those inputs, in the same order.

    Nothing in it holds a tensor, a module or a function of the user's: joint graphs are kept in caches.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[int, ...]
    saved: tuple[int, ...]
    results: tuple[int, ...]
    gradients: tuple[int, ...] = ()
    differentiated: tuple[int, ...] = ()

    @functools.cached_property
    def forward(self) -> tuple[Op, ...]:
        """The ops of the forward: what an engine meets, in the order it meets them."""
        return tuple(op for op in self.ops if op.forward)

    @functools.cached_property
    def backward(self) -> tuple[Op, ...]:
        """The ops of the backward."""
        return tuple(op for op in self.ops if not op.forward)

    @functools.cached_property
    def decisions(self) -> frozenset[int]:
        """Positions of the forward's ops that an engine keeps in any case."""
        follow, found = Decisions(), set[int]()
        for at, op in enumerate(self.forward):
            node = Node()
            node.op, node.optional = op.target, False
            made = [self.values[v] for v in op.outputs]
            node.outs = tuple([Meta((torch.Size(v.shape), v.stride, v.dtype, v.device)) for v in made])
            read = [self.values[v] for v in op.reads]
            sources = [v.producer for v in read if v.producer >= 0 or v.dtype.is_floating_point]
            if follow.meets(at, node, traits(op.target), sources, kept=False):
                found.add(at)
        return frozenset(found)

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
        """The values on each storage, oldest first."""
        found: list[list[int]] = [[] for _ in self.storages]
        for number, value in enumerate(self.values):
            found[value.storage].append(number)
        return tuple(map(tuple, found))

    @functools.cached_property
    def owner(self) -> tuple[int, ...]:
        """The position of the op that allocated each storage, -1 for those of inputs."""
        return tuple(self.values[members[0]].producer for members in self.family)
