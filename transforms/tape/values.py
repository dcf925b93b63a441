"""Values of a forward: numbers and metadata of its tensors, templates of calls, and which ops decide."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from remat.transforms.compat import OpOverload, functions_as_they_are
from remat.transforms.offload import Elsewhere, away_in
from remat.transforms.ops import Traits, traits
from remat.transforms.placeholders import Meta


class Ref(int):
    """Stands for the value of this number in the template of a call: 0, 1, ... are results of ops, in their
    order; -1, -2, ... come from outside."""

    __slots__ = ()


class ValueNumbering(dict[int, tuple["weakref.ref[torch.Tensor]", int]]):
    """Numbers of tensor objects, by their ids.

    An id is reused once its tensor is gone, so each entry knows its own.
    """

    def of(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor, None where it has none."""
        found = self.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def add(self, tensor: torch.Tensor, number: int) -> None:
        self[id(tensor)] = weakref.ref(tensor), number

    def living(self) -> Iterator[tuple[torch.Tensor, int]]:
        """The tensors that are still there, in the order in which they were met."""
        for ref, number in list(self.values()):
            if (tensor := ref()) is not None:
                yield tensor, number


def constants_alike(want: Any, value: Any) -> bool:
    """Whether two values in the arguments of an op, tensors aside, are the same to the op."""
    kind = type(want)
    if kind is not type(value):
        return False
    if kind is float:
        # 0.0 == -0.0, and nan differs from itself.
        same_sign = math.copysign(1.0, want) == math.copysign(1.0, value)
        return (want == value and same_sign) or (want != want and value != value)
    if kind is complex:
        return constants_alike(want.real, value.real) and constants_alike(want.imag, value.imag)
    if kind is list or kind is tuple:
        return len(want) == len(value) and all(map(constants_alike, want, value))
    if kind is dict:
        return want.keys() == value.keys() and all(constants_alike(want[k], value[k]) for k in want)
    return bool(want == value)


def refs_in(template: Any) -> list[int]:
    """The numbers in a template, in their order."""
    found: list[int] = []
    stack = [template]
    while stack:
        value = stack.pop()
        if type(value) is Ref:
            found.append(value)
        elif isinstance(value, (list, tuple)):
            stack.extend(reversed(value))
        elif isinstance(value, dict):
            stack.extend(reversed(value.values()))
    return found


def tensors_in(values: Any) -> Iterable[torch.Tensor]:
    """The tensors among the arguments or results of an op."""
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


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """`value`, the result of an op or what is kept of it, with `function` applied to its tensors."""
    if isinstance(value, (torch.Tensor, Elsewhere)):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)([map_tensors(function, v) for v in value])
    return value


def metadata(out: Any) -> Any:
    """`out` with its tensors replaced by their metadata."""
    if isinstance(out, torch.Tensor):
        stride = out.stride() if out.layout is torch.strided else None
        return Meta((out.shape, stride, out.dtype, out.device))
    if isinstance(out, (tuple, list)):
        return type(out)([metadata(v) for v in out])
    return out


def alike(new: Any, old: Any) -> bool:
    """Whether shapes, dtypes, devices (not strides) and plain values are the same."""
    if isinstance(new, Meta) and isinstance(old, Meta):
        return new[0] == old[0] and new[2:] == old[2:]
    if isinstance(new, (tuple, list)) and isinstance(old, (tuple, list)):
        return len(new) == len(old) and all(map(alike, new, old))
    return bool(new == old) or new != new


def metas(outs: Any) -> list[Meta]:
    """The metadata of the tensors among an op's results."""
    if isinstance(outs, Meta):
        return [outs]
    return [m for part in outs for m in metas(part)] if isinstance(outs, (tuple, list)) else []


def numel(outs: Any) -> int:
    """The number of elements, if `outs` is one tensor."""
    return outs[0].numel() if isinstance(outs, Meta) else 1


def held_tensors(kept: Any) -> list[tuple[torch.Tensor, bool]]:
    """The tensors that are held for a kept value, and whether each is an offloaded one, on its host."""
    return [*((away.host, True) for away in away_in(kept)), *((tensor, False) for tensor in tensors_in(kept))]


def targets(facts: Traits, args: Any, kwargs: Any) -> Iterable[torch.Tensor]:
    """The tensors that a call writes to."""
    if facts.conditional is not None and not args[facts.conditional]:
        return
    for where in facts.writes:
        if isinstance(where, str):
            yield from tensors_in(kwargs.get(where))
        elif where < len(args):
            yield from tensors_in(args[where])


def version_of(tensor: torch.Tensor) -> int:
    """The version counter of a tensor; inference tensors keep none."""
    return 0 if tensor.is_inference() else tensor._version


def storage(tensor: torch.Tensor) -> int:
    """What aliases of one memory have in common while one of them lives."""
    try:
        # As in `memory_of`.
        with functions_as_they_are():
            return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage object of a tensor, which lives as long as its memory; None for tensors that have none."""
    if tensor.layout is not torch.strided:
        return None
    try:
        # Whoever watches torch functions would take this for a call of the user's.
        with functions_as_they_are():
            return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def geometry(tensor: torch.Tensor) -> Any:
    """How a tensor lies in its memory."""
    return (
        tensor.dtype,
        tensor.is_conj(),
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.is_neg(),
    )


def as_strided_arguments(tensor: torch.Tensor) -> tuple[list[int], list[int], int]:
    """The arguments with which `as_strided` makes a tensor of any other one in its memory."""
    return list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset())


# -- decisions -----------------------------------------------------------------------------------------
# Integers and bools that a forward made of floats, such as the indices of `topk`. A recomputation may give
# floats with other last bits. To a float that does nothing; an index that flips picks another expert, and the
# gradient is that of another function. So decisions are kept; `docs/policies.md` says which ops count.
# Where a float may come from: numbers that are the same in every run, data, data that was computed with.
FIXED, GIVEN, COMPUTED = 0, 1, 2
# Ops that make no new numbers of their operands, views aside.
_MOVES = frozenset({"clone", "_to_copy", "copy", "copy_", "contiguous", "fence"})
# Steps, whose results are floats: what they say is no more, and no less, than an integer would.
_STEPS = frozenset({"round", "floor", "ceil", "trunc", "sign", "sgn", "heaviside", "floor_divide"})
_STEPS |= {"bernoulli", "binomial", "poisson"}
# They say where they took a value from, and take it there and then: no other op need read that.
_TAKING = ("max_pool", "fake_quantize")


class Decisions:
    """Follows the ops of a forward, and tells which of them decide.

    Attributes:
        levels: for every op what its results come from, where that is not FIXED.
    """

    __slots__ = ("levels",)

    def __init__(self, tape: Any = None) -> None:
        """`tape`: what has run already; its verdicts say what is kept."""
        self.levels: dict[int, int] = {}
        for at, node in enumerate(tape.nodes if tape is not None else ()):
            self.meets(at, node, traits(node.op), read_by(node, tape), bool(node.verdict))

    def meets(self, at: int, node: Any, facts: Traits, read: Iterable[int], kept: bool) -> bool:
        """Whether op `at` decides; `read`: ops whose results it reads, and -1 for floats from outside;
        `kept`: whether its result is kept in any case."""
        levels = self.levels
        level = max([GIVEN if i < 0 else levels.get(i, FIXED) for i in read], default=FIXED)
        if level == FIXED:
            return False
        discrete = [meta for meta in metas(node.outs) if not _is_inexact(meta)]
        decides = level == COMPUTED and not kept and _decides(node, facts, discrete)
        levels[at] = _after(level, node, facts, discrete, kept or decides)
        return decides


def _after(level: int, node: Any, facts: Traits, discrete: list[Meta], kept: bool) -> int:
    """What the results of an op come from, by what its operands do."""
    if facts.view:
        return level
    name = _name(node.op)
    # A step that is kept is data; but an index made of it may be what is worth keeping.
    if kept and name not in _STEPS:
        return GIVEN
    if name in _MOVES or (discrete and len(discrete) == len(metas(node.outs))):
        return level
    return COMPUTED


def _decides(node: Any, facts: Traits, discrete: list[Meta]) -> bool:
    if facts.view or (facts.writes and facts.conditional is None) or node.optional:
        return False
    made = metas(node.outs)
    if not made:
        # A number that Python has read.
        return isinstance(node.outs, (bool, int, float))
    if len(made) == 1:
        return bool(discrete) or _name(node.op) in _STEPS
    if facts.random or not isinstance(node.op, OpOverload) or _name(node.op).startswith(_TAKING):
        return False
    # Of fused attention the state of the generator, say, is no reason to keep the whole.
    most = max([meta[0].numel() for meta in made if _is_inexact(meta)], default=0)
    return any(meta[0].numel() >= most for meta in discrete)


def _is_inexact(meta: Meta) -> bool:
    dtype: torch.dtype = meta[2]
    return dtype.is_floating_point or dtype.is_complex


def _name(op: Any) -> str:
    return getattr(getattr(op, "_schema", None), "name", "").rpartition("::")[2]


def read_by(node: Any, tape: Any) -> Iterator[int]:
    """What an op on a tape reads, as `Decisions.meets` has it."""
    yield from node.deps
    if any(_is_inexact(tape.outside[i].meta) for i in node.external):
        yield -1
