"""Matrix products without batch dimensions, judged per example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat._core import Call, Decision, OpInfo, TensorMeta
from remat.policies import _catalogue
from remat.policies._base import Named


@dataclass(frozen=True, repr=False)
class SaveUnbatched(Named):
    """JAX's `dots_with_no_batch_dims_saveable`: products with a weight yes, query times key no.

    Below functorch a product of batched operands is a `bmm` whatever the user wrote. So the verdict looks at
    the call itself, whose sizes are per example. It is the same under every nesting of `vmap` and `grad`.
    """

    needs_calls = True

    def asked(self, info: OpInfo) -> Decision:
        kind = _catalogue.kind_of(info.op)
        if kind not in ("matmul", "bmm"):
            return Decision.RECOMPUTE
        rule = _RULES.get(_function_name(info.call))
        batched = kind == "bmm" if rule is None or info.call is None else rule(info.call)
        return Decision.RECOMPUTE if batched else Decision.SAVE

    def decide_by_op(self, op: Any) -> Decision | None:
        return None if _catalogue.kind_of(op) in ("matmul", "bmm") else Decision.RECOMPUTE


def _function_name(call: Call | None) -> str:
    return "" if call is None else getattr(call.function, "__name__", "").strip("_")


def _tensors(call: Call) -> list[TensorMeta]:
    flat: list[TensorMeta] = []
    for value in (*call.args, *call.kwargs.values()):
        values = value if isinstance(value, (list, tuple)) else (value,)
        flat += [v for v in values if isinstance(v, TensorMeta)]
    return flat


def _never(call: Call) -> bool:
    return False


def _always(call: Call) -> bool:
    return True


def _both_have_batches(call: Call) -> bool:
    # numpy's rule: what precedes the last two dimensions is batch, and to be shared it needs both operands.
    operands = _tensors(call)[:2]
    return len(operands) == 2 and all(len(t.shape) > 2 for t in operands)


def _einsum_has_batch(call: Call) -> bool:
    """Whether a letter occurs in two operands and in the output."""
    inputs, output = _einsum_labels(call)
    shared = [label for label in output if sum(label in labels for labels in inputs) > 1]
    return bool(shared)


def _einsum_labels(call: Call) -> tuple[list[set[Any]], set[Any]]:
    equation, *operands = call.args if call.args else (call.kwargs.get("equation"),)
    if not isinstance(equation, str):
        return _sublist_labels(call.args)
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    ranks = [len(t.shape) if isinstance(t, TensorMeta) else 0 for t in operands] + [0] * len(terms)
    inputs = [_labels(term, rank) for term, rank in zip(terms, ranks, strict=False)]
    # Without an arrow the output holds the letters that occur once, and the dimensions of the ellipses.
    letters = left.replace(",", "").replace("...", "")
    implicit = {c for c in letters if letters.count(c) == 1}
    return inputs, (_labels(right, None) if arrow else implicit | {"..."})


def _labels(term: str, rank: int | None) -> set[Any]:
    letters = set(term.replace("...", ""))
    # An ellipsis that stands for no dimension of this operand is no batch.
    empty = rank is not None and rank <= len(term.replace("...", ""))
    return letters | ({"..."} if "..." in term and not empty else set())


def _sublist_labels(args: tuple[Any, ...]) -> tuple[list[set[Any]], set[Any]]:
    # einsum(a, [0, 1], b, [1, 2], [0, 2]): operands and their labels alternate, the output's come last.
    pairs, rest = args[: len(args) // 2 * 2], args[len(args) // 2 * 2 :]
    inputs = [set(labels) for labels in pairs[1::2]]
    if rest:
        return inputs, set(rest[0])
    every = [label for labels in pairs[1::2] for label in labels]
    return inputs, {label for label in every if every.count(label) == 1}


# Keyed by the name of the function without underscores: torch.matmul, Tensor.matmul and `@` are one rule.
_RULES: dict[str, Callable[[Call], bool]] = {
    **dict.fromkeys(("linear", "mm", "addmm", "mv", "addmv", "dot", "vdot", "addbmm", "addr"), _never),
    **dict.fromkeys(("inner", "outer", "ger", "tensordot", "chain_matmul", "linalg_multi_dot"), _never),
    **dict.fromkeys(("bilinear", "rnn_tanh", "rnn_relu", "gru", "lstm", "scaled_mm", "grouped_mm"), _never),
    **dict.fromkeys(("rnn_tanh_cell", "rnn_relu_cell", "gru_cell", "lstm_cell"), _never),
    **dict.fromkeys(("bmm", "baddbmm", "scaled_dot_product_attention", "linalg_vecdot", "cdist"), _always),
    **dict.fromkeys(("matmul", "rmatmul", "imatmul", "linalg_matmul"), _both_have_batches),
    "einsum": _einsum_has_batch,
}

save_weight_matmuls = SaveUnbatched("save_weight_matmuls")
"""Keep matrix products whose operands share no batch dimension (JAX's `dots_with_no_batch_dims`).

Example:
    >>> import torch
    >>> from remat import remat, save_weight_matmuls, saved_residuals
    >>> fn = remat(lambda w, x: ((x @ w) @ (x @ w).mT).sin(), policy=save_weight_matmuls)
    >>> [r.shape for r in saved_residuals(fn, torch.ones(4, 5), torch.ones(2, 3, 4)) if r.why == "policy"]
    [(6, 5), (6, 5)]
"""
