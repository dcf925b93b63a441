"""Floating point operations of one call of an op, from metadata alone.

Source of the formulas: `torch.utils.flop_counter`, which counts a multiply-add as two. Products that it
leaves out are below, counted in the same way; factorizations, FFTs and the like are in `formulas`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from remat._core.formulas import FORMULAS, light_by_name
from remat.transforms import map_leaves

_REGISTERED: dict[str, Callable[..., float]] = {}
# Who remembers what was priced.
_REMEMBERING: list[Callable[[], None]] = []


def set_price(name: str, flops: Callable[..., float]) -> None:
    """Let an op with this qualified name cost what `flops` makes of its arguments, tensors as shapes."""
    _REGISTERED[name] = flops
    for forget in _REMEMBERING:
        forget()


def forget_when_priced(forget: Callable[[], None]) -> None:
    """Have `forget` called when an op gets another price: plans and verdicts made of the old one go."""
    _REMEMBERING.append(forget)


def op_name(op: Any) -> str:
    """`aten::mm` for every overload and for the packet; `higher_order::flex_attention` for that operator."""
    schema = getattr(op, "_schema", None)
    if schema is not None:
        return schema.name
    return getattr(op, "_qualified_op_name", None) or f"higher_order::{op.name()}"


def known_flops(op: Any, args: Any, kwargs: Any, outputs: Any, is_meta: Callable[[Any], bool]) -> int | None:
    """FLOPs of `op(*args, **kwargs)`, or None for an op that nobody gave a formula for.

    Args:
        op: an overload or a higher-order operator.
        args, kwargs: its operands, tensors replaced by something that has a `shape` of ints.
        outputs: its results, likewise, as a tuple.
        is_meta: tells those replacements from other operands.
    """
    call = (tuple(args), dict(kwargs), tuple(outputs))
    shapes, keywords, out = _replaced(call, is_meta, torch.Size)
    name = op_name(op)
    formula = _REGISTERED.get(name) or _formula(name) or _attention(name)
    if formula is not None:
        return int(formula(*shapes, **keywords))
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(_out_of_place(op, name))
    if formula is None:
        formula = _LATER.get(name)
        return None if formula is None else int(formula(*shapes, **keywords))
    if not hasattr(formula, "__wrapped__"):
        # Registered with get_raw=True: it reads `.shape` itself, and the lengths of packed sequences, which
        # it takes to be the longest wherever the operands say that they have no data.
        shapes, keywords, out = _replaced(call, is_meta, _Hollow)
    if name == "aten::convolution_backward":
        out = _as_masked(out, shapes[-1])
    return int(formula(*shapes, **keywords, out_val=out[0] if len(out) == 1 else out))


def _formula(name: str) -> Callable[..., float] | None:
    space, _, base = name.partition("::")
    if space != "aten":
        return None
    found = _OURS.get(base) or FORMULAS.get(base)
    return found or _OURS.get(base.rstrip("_")) or FORMULAS.get(base.rstrip("_"))


def has_formula_of_ours(op: Any) -> bool:
    """Whether an op is a factorization, an FFT, a distance and the like: slower than products of matrices."""
    space, _, base = op_name(op).partition("::")
    return space == "aten" and base in FORMULAS


def _out_of_place(op: Any, name: str) -> Any:
    """The packet that torch's formulas are listed by: `aten.addmm` for `aten.addmm_`, too."""
    packet = getattr(op, "overloadpacket", op)
    return (
        getattr(torch.ops.aten, name[6:-1], packet)
        if name.startswith("aten::") and name[-1] == "_"
        else packet
    )


def is_light(op: Any) -> bool:
    """Whether an op's price is the bytes that it moves: pointwise ops, reductions, copies, draws.

    Ops of other libraries are not: nobody knows what those compute.
    """
    space, _, base = op_name(op).partition("::")
    if space != "aten":
        return space in ("prims", "prim", "higher_order")
    tags = getattr(op, "tags", ())
    return torch.Tag.pointwise in tags or getattr(torch.Tag, "reduction", None) in tags or light_by_name(base)


def _as_masked(out: tuple[Any, ...], mask: Any) -> tuple[Any, ...]:
    """The results in the places where the formula looks for them, though those not wanted were left out."""
    found = iter([value for value in out if value is not None])
    return tuple([next(found, None) if wanted else None for wanted in mask])


def _replaced(tree: Any, is_meta: Callable[[Any], bool], made: Callable[[Any], Any]) -> Any:
    """`tree` with `made(shape)` in place of what stands for a tensor."""

    def replace(leaf: Any) -> Any:
        return made(leaf.shape) if is_meta(leaf) else leaf

    return map_leaves(replace, tree)


class _Hollow:
    """What formulas read of a tensor without data."""

    device = torch.device("meta")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = torch.Size(shape)
        self.ndim = len(shape)

    def transpose(self, first: int, second: int) -> _Hollow:
        shape = list(self.shape)
        shape[first], shape[second] = shape[second], shape[first]
        return _Hollow(tuple(shape))

    def size(self, dim: int) -> int:
        return self.shape[dim]


def _attention(name: str) -> Callable[..., float] | None:
    if not name.startswith("aten::") or "scaled_dot_product" not in name:
        return None
    return _sdpa_backward if "backward" in name else _sdpa


def _sdpa(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> float:
    """Both products, not halved for causal masks (as torch counts); heads of `query`, shared keys or not."""
    *batch, rows, width = query
    return 2 * math.prod(batch) * rows * key[-2] * (width + value[-1])


def _sdpa_backward(*args: Any, **_: Any) -> float:
    # Five products in place of two; the gradient comes first in the argument list.
    queries = [s for s in args if isinstance(s, torch.Size) and len(s) >= 3]
    return 2.5 * _sdpa(*queries[1:4])


# Keys in a block of the kernels of torch (`kvSplitSize`) and of FlashAttention-2.
_KEYS_ON_CPU, _KEYS_ON_GPU = 512, 128


def causal_share(op: Any, args: Any, kwargs: Any, rows: int, *, on_cpu: bool = False) -> float:
    """The share of an op's FLOPs that its kernel computes: a causal mask hides whole blocks of keys."""
    schema = getattr(op, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    block = _KEYS_ON_CPU if on_cpu else _KEYS_ON_GPU
    return min(1.0, (rows + block) / (2 * rows)) if given.get("is_causal") else 1.0


def _linear(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def _flex_backward(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> float:
    return 2.5 * _sdpa(query, key, value)


def _chunked_cross_entropy(x: torch.Size, weight: torch.Size, *rest: Any, **__: Any) -> float:
    """The logits, and both gradients where the forward makes them (torch 2.13: the last arguments say)."""
    return 2 * math.prod(x) * weight[0] * (1 + sum(wanted is True for wanted in rest[-3:-1]))


# What torch itself counts since 2.13, and its chunked losses.
_LATER: dict[str, Callable[..., float]] = {
    "torch_nn::_linear_cross_entropy_batch_chunked": _chunked_cross_entropy,
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": _chunked_cross_entropy,
    "higher_order::flex_attention": _sdpa,
    "higher_order::flex_attention_backward": _flex_backward,
}
_OURS: dict[str, Callable[..., float]] = {
    "mv": lambda matrix, vector: 2 * math.prod(matrix),
    "addmv": lambda bias, matrix, vector, **_: 2 * math.prod(matrix),
    "dot": lambda a, b: 2 * math.prod(a),
    "vdot": lambda a, b: 2 * math.prod(a),
    "addbmm": lambda bias, a, b, **_: 2 * math.prod(a) * b[-1],
    "_int_mm": lambda a, b, **_: 2 * math.prod(a) * b[-1],
    "_weight_int8pack_mm": lambda a, b, *_, **__: 2 * math.prod(a) * b[0],
    "linear": _linear,
    "mkldnn_linear": _linear,
}
