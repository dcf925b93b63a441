"""What the engine needs to know of an aten op: does it draw, write, alias, or act on the outside."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from remat.transforms.caches import BoundedCache

T = TypeVar("T")
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
}
# Ops that other processes take part in; they run in both passes, always.
_OUTSIDE = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor", "fsdp", "symm_mem", "inductor_debug")
_CHECKS = ("_assert", "sym_constrain", "_print", "_functional_assert")
# Where an op that draws has the tag that says so.
_TOLD = ("aten", "prims", "prim", "profiler", *_OUTSIDE)

# In a checkout transforms/ is reached through a link, so that it has two spellings.
_HERE = os.path.dirname(os.path.abspath(__file__))
_HIDDEN = (os.path.dirname(torch.__file__), os.path.dirname(_HERE), os.path.realpath(_HERE))
# Batch norm writes its running statistics without saying so in its schema: (where, where the flag is).
_HIDDEN_WRITES = {
    _aten.native_batch_norm.default: ((3, 4), 5),
    _aten.cudnn_batch_norm.default: ((3, 4), 5),
    _aten.miopen_batch_norm.default: ((3, 4), 5),
}
# Kernels that look at whether an operand requires grad, and leave out what a backward needs where none does.
_ASKS_GRAD = {_aten._sparse_mm_reduce_impl.default}
# Autograd saves what these write into before they do, and reads it as they left it.
_SAVES_UNWRITTEN = {_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default}


class Traits:
    """Facts of one op, read once from its schema.

    `shape_only`: it makes a new tensor like its operand, whose numbers it does not read. `may_draw`: it draws
    random numbers, or could without saying so. `sized_by_data`: numbers
    decide the shape of its result, or could. `collective`: other processes take part in it; `outside`: it
    acts on them, or on the user's screen or program. `asks_grad`: on operands without gradients it computes
    less. `saves_unwritten`: autograd saves an operand that it then writes into.
    """

    __slots__ = (
        "asks_grad",
        "collective",
        "conditional",
        "higher_order",
        "ignored",
        "inplace",
        "may_draw",
        "outside",
        "random",
        "reshapes",
        "saves_unwritten",
        "shape_only",
        "sized_by_data",
        "uninitialized",
        "view",
        "writes",
    )

    def __init__(self, op: Any) -> None:
        schema = getattr(op, "_schema", None)
        self.higher_order = schema is None  # an operator on functions: torch.cond, flex attention
        self.asks_grad, self.saves_unwritten = op in _ASKS_GRAD, op in _SAVES_UNWRITTEN
        self.ignored = op in _IGNORED or getattr(op, "namespace", "") == "profiler"
        self.random = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        self.writes: tuple[str | int, ...] = ()
        self.conditional: int | None = None  # position of the flag on which the writes depend
        self.view = self.inplace = False
        self.reshapes = torch.Tag.inplace_view in getattr(op, "tags", ())
        name, ours = _basename(op), getattr(op, "namespace", "") == "aten"
        # By their names, which mean something among torch's own ops only.
        self.shape_only = ours and (name.endswith("_like") or name.startswith("new_"))
        self.uninitialized = ours and name.startswith(("empty", "new_empty"))
        # An op of somebody else's may draw without saying so.
        self.may_draw = self.random or getattr(op, "namespace", "aten") not in _TOLD
        tags = getattr(op, "tags", ())
        self.sized_by_data = torch.Tag.dynamic_output_shape in tags or self.may_draw and not self.random
        self.collective = getattr(op, "namespace", "") in _OUTSIDE
        self.outside = self.collective or (ours and name.startswith(_CHECKS))
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
    if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_meta:
        return False
    # A factory may take no more than the shape of it: our programs say `device` then.
    device = kwargs.get("device") if kwargs else None
    return device is None or torch.device(device).type == "meta"


def is_cast_of_leaf(func: Any, args: Any) -> bool:
    """Whether an op is a cast that autocast may have in its cache."""
    return func is torch.ops.aten._to_copy.default and args[0].is_leaf and args[0].requires_grad


def draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of a random op really draws numbers: attention without dropout does not."""
    probability = kwargs.get("dropout_p")
    if probability is None:
        schema = op._schema.arguments
        at = next((i for i, a in enumerate(schema) if a.name == "dropout_p"), None)
        if at is None:
            return True
        probability = args[at] if at < len(args) else schema[at].default_value
    return bool(probability)


def instances(kind: type[T], value: Any) -> Iterator[T]:
    """Everything of one kind among the arguments or results of an op."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from instances(kind, part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from instances(kind, part)


def user_place() -> str | None:
    """`file:line (function)` of the innermost frame that belongs to neither torch nor this library."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_user_frame(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return None


def user_line() -> str:
    """`user_place` for messages."""
    return user_place() or "an unknown line"


def is_user_frame(frame: Any) -> bool:
    """Whether a stack frame runs code of neither torch nor this library."""
    name = frame.f_code.co_filename
    return not name.startswith(_HIDDEN) and not name.startswith("<")
