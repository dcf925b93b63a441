"""What the engine needs to know of an aten op, and of the tensors that it reads and makes.

Does it draw, write, alias, decide, or act on the outside?
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, TypeVar

import torch

from remat.transforms.caches import BoundedCache
from remat.transforms.compat import COMPILED_CODE, OpOverload, functions_as_they_are
from remat.transforms.objects import attributes, is_tensor
from remat.transforms.placeholders import Meta
from remat.transforms.pytree import flatten

V = TypeVar("V")

# Ops that torch dispatches or not depending on grad mode, hooks and caches, and that compute nothing: the
# forward and its recomputation may differ in them.
_aten = torch.ops.aten
_IGNORED = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.lift_fresh.default,
    _aten.is_same_size.default,
    _aten._has_same_storage_numel.default,
    _aten._new_zeros_with_same_feature_meta.default,
    _aten.to.dtype_layout,
    _aten.to.dtype,
    torch.ops.prim.device.default,
    *(getattr(_aten.set_, name) for name in ("source_Storage", "source_Storage_storage_offset")),
}
# Ops that other processes take part in. Functional ones are ops as others are, which a policy may keep; of
# the rest, which write and hand out what is to be waited for, a tape does not tell all.
FUNCTIONAL = ("_c10d_functional", "c10d_functional", "_dtensor")
_OUTSIDE = ("c10d", "fsdp", "symm_mem", "inductor_debug")
_CHECKS = ("_assert", "sym_constrain", "_print", "_functional_assert")
# Where an op that draws has the tag that says so.
_TOLD = ("aten", "prims", "prim", "profiler", *FUNCTIONAL, *_OUTSIDE)

# Batch norm writes its running statistics without saying so in its schema: (where, where the flag is).
_HIDDEN_WRITES = {
    _aten.native_batch_norm.default: ((3, 4), 5),
    _aten.cudnn_batch_norm.default: ((3, 4), 5),
    _aten.miopen_batch_norm.default: ((3, 4), 5),
}
# Kernels that look at whether an operand requires grad, and leave out what a backward needs where none does.
_ASKS_GRAD = {_aten._sparse_mm_reduce_impl.default}
# These write all of what they are given, and do not read it.
_FILLS = frozenset(
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ "
    "_foreach_copy_ _foreach_zero_ _foreach_fill_".split()
)
# Autograd saves what these write into before they do, and reads it as they left it.
_SAVES_UNWRITTEN = {_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default}


class Traits:
    """Facts of one op, read once from its schema.

    `shape_only`: it makes a new tensor like its operand, whose numbers it does not read. `lies_alike`: that
    tensor lies in memory as the operand does, where the call does not say otherwise. `may_draw`: it draws
    random numbers, or could without saying so. `sized_by_data`: numbers
    decide the shape of its result, or could. `collective`: other processes take part in it, in ways that no
    op tells; `functional`: they do, and it is an op like any other; `outside`: it acts on them, or on the
    user's screen or program. `asks_grad`: on operands without gradients it computes
    less. `saves_unwritten`: autograd saves an operand that it then writes into. `fills`: it writes all of its
    first operand, or of the tensors in it, and does not read that.
    """

    def __init__(self, op: Any) -> None:
        schema = getattr(op, "_schema", None)
        self.higher_order = schema is None  # an operator on functions: torch.cond, flex attention
        self.asks_grad, self.saves_unwritten = op in _ASKS_GRAD, op in _SAVES_UNWRITTEN
        self.ignored = op in _IGNORED or getattr(op, "namespace", "") == "profiler"
        self.functional = getattr(op, "namespace", "") in FUNCTIONAL
        # What wraps a collective's result, to be waited for later.
        self.ignored = self.ignored or self.functional and _basename(op) == "_wrap_tensor_autograd"
        self.random = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        self.writes: tuple[str | int, ...] = ()
        self.conditional: int | None = None  # position of the flag on which the writes depend
        self.view = self.inplace = self.only_shape = False
        self.changes_shape = torch.Tag.inplace_view in getattr(op, "tags", ())
        self.name, self.native = _basename(op), getattr(op, "namespace", "") == "aten"
        self.fills = self.native and self.name in _FILLS
        name, ours = self.name, self.native
        # By their names, which mean something among torch's own ops only.
        self.shape_only = ours and (name.endswith("_like") or name.startswith("new_"))
        self.lies_alike = ours and name.endswith("_like")
        self.uninitialized = ours and name.startswith(("empty", "new_empty"))
        # An op of somebody else's may draw without saying so.
        self.may_draw = self.random or getattr(op, "namespace", "aten") not in _TOLD
        tags = getattr(op, "tags", ())
        self.sized_by_data = torch.Tag.dynamic_output_shape in tags or self.may_draw and not self.random
        self.collective = getattr(op, "namespace", "") in _OUTSIDE
        self.outside = self.collective or self.functional or (ours and name.startswith(_CHECKS))
        if op is COMPILED_CODE:
            self.writes = (1,)  # of its inputs, as it says
        if schema is None:
            return
        self.writes = tuple(
            arg.name if arg.kwarg_only else i
            for i, arg in enumerate(schema.arguments)
            if arg.alias_info is not None and arg.alias_info.is_write
        )
        if op in _HIDDEN_WRITES:
            self.writes, self.conditional = _HIDDEN_WRITES[op]
        aliases = any(ret.alias_info is not None for ret in schema.returns)
        self.view = (aliases and not self.writes) or op is torch.ops.aten._unsafe_view.default
        self.inplace = aliases and bool(self.writes)
        self.only_shape = self.changes_shape and not name.startswith(("resize", "set_"))


# By id, because an OpOverload computes its hash in Python; the op itself is held, so its id stays its own.
_TRAITS: BoundedCache[int, tuple[Any, Traits]] = BoundedCache(8192)


def traits(op: Any) -> Traits:
    """The traits of `op`, from a table filled as ops are met."""
    found = _TRAITS.get(id(op))
    if found is None:
        found = _TRAITS[id(op)] = op, Traits(op)
    return found[1]


def _basename(op: Any) -> str:
    return getattr(getattr(op, "_schema", None), "name", "").rpartition("::")[2]


def is_shape_arithmetic(args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> bool:
    """Whether a call computes sizes only, on the meta device: torch does so for tangents known to be zero,
    or not."""
    if not args or not is_tensor(args[0]) or not args[0].is_meta:
        return False
    # A factory may take no more than the shape of it: our programs say `device` then.
    device = kwargs.get("device") if kwargs else None
    return device is None or torch.device(device).type == "meta"


def is_cast_of_leaf(func: Any, args: Any) -> bool:
    """Whether an op is a cast that autocast may have in its cache."""
    return func is torch.ops.aten._to_copy.default and args[0].is_leaf and args[0].requires_grad


def draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of a random op really draws numbers: attention without dropout does not, nor does
    what is told that it does not train."""
    for at, known in enumerate(op._schema.arguments):
        if known.name == "dropout_p" or (known.name in _SWITCHES and op.namespace == "aten"):
            default = known.default_value if known.has_default_value() else None
            given = args[at] if at < len(args) else kwargs.get(known.name, default)
            # (Dropout that is not told whether it trains does.)
            if given is not None and not given:
                return False
    return True


# Arguments that turn the draws of torch's own ops off.
_SWITCHES = ("train", "training")


def tensors_in(values: Any) -> Iterable[torch.Tensor]:
    """The tensors among the arguments or results of an op."""
    if is_tensor(values):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            if is_tensor(value):
                yield value
            elif isinstance(value, (tuple, list)):
                yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(tuple(values.values()))


def has_strides(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one block of memory with an order in it: no sparse and no nested one."""
    return tensor.layout is torch.strided and not tensor.is_nested


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """The sizes of a tensor; of a nested one those that its parts have in common, and how many numbers."""
    if not tensor.is_nested:
        return tensor.shape
    sizes = (tensor.size(0),) if tensor.layout is torch.strided else tensor.shape
    # (Each jagged tensor has a symbol of its own among its sizes.)
    return torch.Size([n for n in (*sizes, tensor.numel()) if type(n) is int])


def metadata(out: Any) -> Any:
    """`out` with its tensors replaced by their metadata."""
    if is_tensor(out):
        stride = out.stride() if has_strides(out) else None
        return Meta((shape_of(out), stride, out.dtype, out.device))
    if isinstance(out, (tuple, list)):
        return type(out)([metadata(v) for v in out])
    return out


def relaid(meta: Any, tensor: torch.Tensor) -> Any:
    """Metadata with the strides of `tensor`, where that has the same otherwise."""
    now = metadata(tensor)
    return now if now[0] == meta[0] and now[2:] == meta[2:] else meta


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


def targets(facts: Traits, args: Any, kwargs: Any) -> Iterable[torch.Tensor]:
    """The tensors that a call writes to."""
    if facts.conditional is not None and not args[facts.conditional]:
        return
    for where in facts.writes:
        if isinstance(where, str):
            yield from tensors_in(kwargs.get(where))
        elif facts.higher_order:
            yield from args[0].written(args[where])
        elif where < len(args):
            yield from tensors_in(args[where])


def updates(facts: Traits, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call reads only to write it anew: the running statistics of a batch norm that trains."""
    trains = facts.conditional is not None and args[facts.conditional]
    return tuple([args[int(at)] for at in facts.writes]) if trains else ()


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


def place(tensor: torch.Tensor) -> int:
    """As `storage`, and what an alias that NumPy has made of the same memory has in common with it."""
    try:
        with functions_as_they_are():
            memory = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return id(tensor)
    return address(memory) or memory._cdata


def address(memory: torch.UntypedStorage) -> int | None:
    """Where a memory begins; None where there is none, as of meta tensors and of zeros known to torch."""
    try:
        # (Those of fake tensors are on the meta device, and warn where they are asked.)
        return None if memory.device.type == "meta" else memory.data_ptr() or None
    except RuntimeError:
        return None


def memory_of(tensor: torch.Tensor, values: bool = False) -> torch.UntypedStorage | None:
    """The storage object of a tensor, or of a sparse one's `values`, which lives as long as its memory."""
    sparse = not has_strides(tensor)
    if sparse and not (values and str(tensor.layout).startswith("torch.sparse")):
        return None
    try:
        # Whoever watches torch functions would take this for a call of the user's.
        with functions_as_they_are():
            if sparse:
                tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
            return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def octets(memory: torch.UntypedStorage) -> torch.Tensor:
    """A memory as a tensor."""
    empty = torch.empty(0, dtype=torch.uint8, device=memory.device)
    return empty.set_(memory, 0, (memory.nbytes(),), (1,))


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is freed."""
    memory = memory_of(tensor) if tensor.numel() else None
    return memory is not None and not memory.nbytes()


def span(shape: Any, stride: Any) -> int:
    """How many elements of memory lie between the first and the last one of a tensor, both counted."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where its elements share memory, as those of an expanded one do, or as zeros have
    none: forward mode refuses such ones, and gives a tangent the layout of its primal."""
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    overlaps = tensor._is_zerotensor() or any(step == 0 and size > 1 for step, size in steps)
    return tensor.clone(memory_format=torch.contiguous_format) if overlaps else tensor


def lies(tensor: torch.Tensor) -> Any:
    """What of a tensor's strides decides which ops run and how results lie: None where it is contiguous.

    It is the order of the dimensions in memory, and whether there are gaps; their width does not matter.
    """
    if not has_strides(tensor):
        return tensor.layout
    if tensor.is_contiguous():
        return None
    shape, stride = tensor.shape, tensor.stride()
    return order(shape, stride), span(shape, stride) == tensor.numel()


def order(shape: Any, stride: Any) -> tuple[int, ...]:
    """The order of dimensions in memory: the rank of each stride. Random numbers are drawn in this order, and
    tensors made like another one have it.

    A dimension of size 1 has none, except in images, where torch tells memory formats by those, too.
    """
    images = len(shape) in (4, 5)
    steps = [step if n != 1 or images else None for n, step in zip(shape, stride, strict=True)]
    ranks = sorted({0, *[step for step in steps if step is not None]})
    return tuple([-1 if step is None else ranks.index(step) for step in steps])


def lies_as(tensor: torch.Tensor, meta: Any) -> bool:
    """Whether the dimensions of a tensor lie in the order of this metadata."""
    shape, stride = meta[:2]
    if stride is None or tensor.layout is not torch.strided:
        return True
    now = tensor.stride()
    return stride == now or (shape == tensor.shape and order(shape, stride) == order(shape, now))


def lying_as(tensor: torch.Tensor, meta: Any) -> torch.Tensor:
    """`tensor`, or a copy of it that lies as this metadata says.

    Hooks of the user's return what has the same numbers. Ops that draw for it do so in its order.
    """
    shape, stride = meta[:2]
    if stride is None or tensor.shape != shape or lies_as(tensor, meta):
        return tensor
    stand_in = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
    return torch.empty_like(stand_in, device=tensor.device).copy_(tensor)


def hands_out(packed: Any, tensor: torch.Tensor) -> bool:
    """Whether what a saved-tensor hook made of a tensor has the tensor's own memory, so that the other hook
    hands out what somebody may have written there."""
    leaves = [*flatten(packed)[0], *(attributes(packed) or {}).values()]
    return any([_in_memory_of(tensor, leaf) for leaf in leaves])


def _in_memory_of(tensor: torch.Tensor, other: Any) -> bool:
    if is_tensor(other):
        return storage(other) == storage(tensor)
    arrays = getattr(sys.modules.get("numpy"), "ndarray", None)
    if arrays is None or not issubclass(type(other), arrays) or tensor.device.type != "cpu":
        return False
    with functions_as_they_are():
        first, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
    return first <= other.ctypes.data < first + size


def geometry(tensor: torch.Tensor) -> Any:
    """How a tensor lies in its memory; of a sparse or nested one, its sizes."""
    if not has_strides(tensor):
        return tensor.dtype, False, shape_of(tensor), tensor.layout
    place = tensor.shape, tensor.stride(), tensor.storage_offset()
    return tensor.dtype, tensor.is_conj(), *place, tensor.is_neg()


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


class ByTensor(dict[int, tuple["weakref.ref[torch.Tensor]", V]]):
    """Values by the ids of tensors. An id is reused once its tensor is gone, so each entry knows its own."""

    def of(self, tensor: torch.Tensor) -> V | None:
        """The value of a tensor, None where it has none."""
        found = self.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def add(self, tensor: torch.Tensor, value: V) -> None:
        self[id(tensor)] = weakref.ref(tensor), value

    def living(self) -> Iterator[tuple[torch.Tensor, V]]:
        """The tensors that are still there, in the order in which they were met."""
        for ref, value in list(self.values()):
            if (tensor := ref()) is not None:
                yield tensor, value


def grouped(keys: Iterable[Any]) -> dict[Any, list[int]]:
    """The positions of each key."""
    found = dict[Any, list[int]]()
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return found


class Decisions:
    """Follows the ops of a forward, and tells which of them decide.

    Attributes:
        levels: for every op what its results come from, where that is not FIXED.
    """

    __slots__ = ("levels",)

    def __init__(self, tape: Any = None) -> None:
        """`tape`: what has run already; its verdicts say what is kept."""
        self.levels: dict[int, int] = {}
        if tape is None:
            return
        for at, node in enumerate(tape.nodes):
            given = [tape.meta_of(number)[0].numel() for number in node.reads()]
            self.meets(at, node, traits(node.op), read_by(node, tape), bool(node.verdict), given)

    def meets(
        self, at: int, node: Any, facts: Traits, read: Iterable[int], kept: bool, given: Iterable[int]
    ) -> bool:
        """Whether op `at` decides; `read`: ops whose results it reads, and -1 for floats from outside;
        `kept`: whether its result is kept in any case; `given`: how many elements its operands have."""
        levels = self.levels
        level = max([GIVEN if i < 0 else levels.get(i, FIXED) for i in read], default=FIXED)
        if level == FIXED:
            return False
        discrete = [meta for meta in metas(node.outs) if not is_inexact(meta[2])]
        decides = level == COMPUTED and not kept and _decides(node, facts, discrete, given)
        levels[at] = _after(level, node, facts, discrete, kept or decides)
        return decides


def _after(level: int, node: Any, facts: Traits, discrete: list[Meta], kept: bool) -> int:
    """What the results of an op come from, by what its operands do."""
    if facts.view:
        return level
    name = _basename(node.op)
    # A step that is kept is data; but an index made of it may be what is worth keeping.
    if kept and name not in _STEPS:
        return GIVEN
    if name in _MOVES or (discrete and len(discrete) == len(metas(node.outs))):
        return level
    return COMPUTED


def _decides(node: Any, facts: Traits, discrete: list[Meta], given: Iterable[int]) -> bool:
    if facts.view or (facts.writes and facts.conditional is None) or node.optional:
        return False
    made = metas(node.outs)
    if not made:
        # A number that Python has read.
        return isinstance(node.outs, (bool, int, float))
    if len(made) == 1:
        return bool(discrete) or _basename(node.op) in _STEPS
    if facts.random or not isinstance(node.op, OpOverload) or _basename(node.op).startswith(_TAKING):
        return False
    if not discrete:
        return False
    # Of fused attention the state of the generator, say, is no reason to keep the whole. Nor is the workspace
    # of a kernel (oneDNN's LSTM): larger than all it reads and makes, or bytes of a size of their own.
    beside = [meta[0].numel() for meta in made if is_inexact(meta[2])]
    sizes = {*beside, *given}
    least, most = max(beside, default=0), max(sizes, default=0)
    return any(
        least <= (count := meta[0].numel()) <= most and (meta[2] is not torch.uint8 or count in sizes)
        for meta in discrete
    )


def is_inexact(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype are floats, or pairs of them."""
    return dtype.is_floating_point or dtype.is_complex


def read_by(node: Any, tape: Any) -> Iterator[int]:
    """What an op on a tape reads, as `Decisions.meets` has it."""
    yield from node.deps
    if any(is_inexact(tape.outside[i].meta[2]) for i in node.external):
        yield -1


class Operands:
    """The places in memory of the values of a second run, by their numbers on the forward's tape.

    Places and not tensor objects: levels of `torch.func` wrap a value anew. What is unknown is not compared:
    aliases that autograd makes, memory from outside that the function writes to (each run has a copy), and
    memory that Python has looked at or replaced.

    Args:
        arguments: those of this run, in the order of the forward's.
        outside: gives what the forward has read from outside at a place on the tape, if that is known; of an
            argument, what it was there.
        written: the numbers of the memories from outside that the function writes to.
        same: whether two tensors have the same numbers, as a constant has that each run makes anew.
    """

    def __init__(
        self,
        tape: Any,
        arguments: Sequence[torch.Tensor],
        outside: Callable[[int], torch.Tensor | None],
        written: Set[int],
        same: Callable[[torch.Tensor, torch.Tensor], bool],
    ) -> None:
        self.tape, self.outside, self.same = tape, outside, same
        self._unknown = written | tape.raw_accessed
        self._memories: dict[int, weakref.ref[Any]] = {}  # by their roots
        self._places: dict[int, tuple[weakref.ref[Any], Any]] = {}
        for at, tensor in enumerate(arguments):
            self.add(-1 - at, tensor)

    def made(self, node: Any, out: Any) -> None:
        """Note where the results of an op lie."""
        for number, tensor in enumerate(tensors_in(out), node.first):
            self.add(number, tensor)

    def lies_at(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies where the value with this number is known to lie."""
        place = self._places.get(number)
        return place is not None and place[0]() is memory_of(tensor) and place[1] == geometry(tensor)

    def unlike(self, read: Iterable[tuple[int, torch.Tensor]], absent: Callable[[], Any]) -> str | None:
        """What an op reads, with the numbers that it read in the forward, that is not that; None if it is.

        `absent` knows what caches hold: `cache.setdefault(key, make())` makes it anew and reads the first."""
        for number, tensor in read:
            memory, place = memory_of(tensor), self._places.get(number)
            if memory is None or (self._unknown and self.tape.root_of(number) in self._unknown):
                continue
            if place is not None:
                there = place[0]() is memory and place[1] == geometry(tensor)
                if not there and not absent().is_held(number, tensor) and not self._was(number, tensor):
                    return f"another tensor ({list(tensor.shape)}) than in the forward"
                continue
            was = self.outside(-1 - number) if number < 0 else None
            # Operands that no backward reads have no memory, so there is nothing to compare.
            if was is None or is_hollow(was) or is_hollow(tensor) or _one_place(was, tensor):
                continue
            if not self.same(was, tensor):
                what = f"a tensor ({list(tensor.shape)}) that was put in the place of the forward's"
                return f"{what}. Pass it as an argument, or write by copy_"
        return None

    def _was(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether it is the argument itself, which hooks of the user's have given the run a copy of."""
        was = self.outside(-1 - number) if number < 0 else None
        return was is not None and _one_place(was, tensor)

    def add(self, number: int, tensor: torch.Tensor) -> None:
        """Note where the value with this number lies."""
        memory = memory_of(tensor)
        if memory is None:
            return
        # A kept view lies apart from its base. A region inside may make the same view of the base by no op.
        first = self._memories.setdefault(self.tape.root_of(number), weakref.ref(memory))
        if first() is memory:
            self._places[number] = first, geometry(tensor)


def _one_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors look at one memory in one way."""
    return memory_of(one) is memory_of(other) and geometry(one) == geometry(other)
