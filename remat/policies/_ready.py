"""The built-in policies, and factories of policies for ops and names."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from remat._core import Decision, OpInfo, described, warn_user
from remat.policies import _catalogue
from remat.policies._base import Constant, Named, Policy, PolicyError
from remat.transforms import BoundedCache
from remat.transforms.compat import HigherOrderOperator, OpOverload, OpOverloadPacket, is_composite

if TYPE_CHECKING:
    from remat.transforms.tape import Tape


@dataclass(frozen=True, repr=False)
class OfKind(Named):
    """One verdict for the costly ops of some kinds of the catalogue; everything else is recomputed."""

    kinds: tuple[_catalogue.Kind, ...]
    decision: Decision = Decision.SAVE

    def asked(self, info: OpInfo) -> Decision:
        return self.decide_by_op(info.op)

    def finished(self, tape: Tape) -> None:
        if "attention" in self.kinds:
            _report_taken_apart(self, tape)

    def decide_by_op(self, op: Any) -> Decision:
        return self.decision if _catalogue.kind_of(op) in self.kinds else Decision.RECOMPUTE


# Policies that were warned of.
_apart: BoundedCache[str, None] = BoundedCache(64)
# Only `scaled_dot_product_attention` calls it, where it has no fused kernel.
_SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default


def _report_taken_apart(policy: Policy, tape: Tape) -> None:
    """Warn, once for a policy, that torch computes the attention of a region by products and a softmax."""
    if repr(policy) in _apart:
        return
    ops = {node.op for node in tape.nodes}
    if _SAFE_SOFTMAX in ops and not any(_catalogue.kind_of(op) == "attention" for op in ops):
        _apart[repr(policy)] = None
        warn_user(
            f"Policy {policy!r} keeps no attention: torch computes scaled_dot_product_attention by products "
            "and a softmax here, as it does on a CPU with dropout, or for operands without four dimensions. "
            "(Said once.)"
        )


@dataclass(frozen=True, repr=False)
class SaveOps(Policy):
    """Saves the outputs of the listed overloads and higher-order operators."""

    ops: frozenset[Any]

    def __call__(self, info: OpInfo) -> Decision:
        return self.decide_by_op(info.op)

    def decide_by_op(self, op: Any) -> Decision:
        return Decision.SAVE if op in self.ops else Decision.RECOMPUTE

    def __repr__(self) -> str:
        return f"save_ops({', '.join(sorted(map(_op_label, self.ops)))})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Ops are bindings into torch's dispatcher and cannot be pickled; their names can.
        return _ops_by_name, (sorted(_op_label(op) for op in self.ops),)


def _op_label(op: Any) -> str:
    return str(op) if isinstance(op, OpOverload) else f"higher_order.{op.name()}"


def op_named(label: str) -> Any:
    """The op, or the packet, that `torch.ops` has by this name."""
    return functools.reduce(getattr, label.split("."), torch.ops)


def _ops_by_name(labels: list[str]) -> SaveOps:
    return SaveOps(frozenset(map(op_named, labels)))


def save_ops(*ops: Any) -> SaveOps:
    """Save the outputs of these ops.

    Args:
        ops: overloads (`torch.ops.aten.mm.default`), packets (`torch.ops.aten.mm`: all its overloads),
            higher-order operators, `torch.library.custom_op`s.

    An op that is made of others, such as `torch.ops.aten.matmul`, is never met: those that it is made of are.
    There is a warning where all are such.

    Raises:
        RematError: one of them is not an op (also a TypeError). `torch.mm` is a function and not an op.

    Example:
        >>> import torch
        >>> from remat import save_ops
        >>> save_ops(torch.ops.aten.mm.default)
        save_ops(aten.mm.default)
    """
    found: set[Any] = set()
    for op in ops:
        found.update(_overloads(op))
    if found and not torch.compiler.is_dynamo_compiling() and _never_met(found):
        names = ", ".join(sorted({str(op.overloadpacket) for op in found}))
        warn_user(
            f"save_ops({names}) saves nothing: such an op is made of others, and a region meets those. "
            "remat.explain(fn, x) names them; for products of matrices write save_matmuls, for attention "
            "save_attention."
        )
    return SaveOps(frozenset(found))


def is_op(value: Any) -> bool:
    """Whether `save_ops` accepts `value`."""
    return isinstance(value, (OpOverload, OpOverloadPacket, HigherOrderOperator, _catalogue.CustomOp))


def _overloads(op: Any) -> list[Any]:
    if isinstance(op, _catalogue.CustomOp):
        return [op._opoverload]
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    if isinstance(op, (OpOverload, HigherOrderOperator)):
        return [op]
    advice = f"Write the op below it, save_ops({below(op)})."
    if isinstance(op, Policy):
        advice = f"It is a policy already: write policy={op!r}, and join policies by |."
    elif below(op) is None:
        advice = (
            "Write torch.ops.aten.mm.default, say, or torch.ops.aten.mm for all its overloads; for all "
            "products of matrices policy=save_matmuls; for values marked by checkpoint_name save_names."
        )
    raise PolicyError(f"save_ops got {described(op)}, which is not an op. {advice}")


def below(function: Any) -> str | None:
    """How the op is written that a function of torch's calls, where it is one op of the same name."""
    name = getattr(function, "__name__", "")
    builtin = isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType))
    packet = getattr(torch.ops.aten, name, None) if builtin and name else None
    if packet is None:
        return None
    return None if _never_met(_overloads(packet)) else f"torch.ops.aten.{name}"


def _never_met(ops: Iterable[Any]) -> bool:
    """Whether a region meets none of these ops, as they are made of others; code with `out=` aside."""
    return all(is_composite(op) for op in ops if not str(op).endswith(".out"))


@dataclass(frozen=True, repr=False)
class ByName(Policy):
    """A verdict for values that `checkpoint_name` marked, another for the rest.

    Attributes:
        listed_names: the names listed.
        listed, others: verdicts for values whose name is in the list, and for all other values.
        strict: a listed name that no value of a region bears raises instead of warning.
        maker: the function that made it, for `repr`.
    """

    listed_names: frozenset[str]
    listed: Decision
    others: Decision
    strict: bool
    maker: str

    def __call__(self, info: OpInfo) -> Decision:
        return self.listed if info.name in self.listed_names else self.others

    def names(self) -> Iterator[tuple[str, bool]]:
        return iter([(name, self.strict) for name in sorted(self.listed_names)])

    def __repr__(self) -> str:
        names = ", ".join(map(repr, sorted(self.listed_names)))
        return f"{self.maker}({names}{', strict=True' if self.strict else ''})"


def _checked(maker: str, names: tuple[Any, ...]) -> frozenset[str]:
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong or not names:
        got = f"{wrong[0]!r} of type {type(wrong[0]).__name__}" if wrong else "no name"
        raise PolicyError(
            f"{maker} got {got}: write the names given to checkpoint_name, as {maker}('q', 'k')."
        )
    return frozenset(names)


def save_names(*names: str, strict: bool = False) -> ByName:
    """Save the values that `checkpoint_name` gave one of these names; recompute everything else.

    Args:
        names: the names. One that never occurs in a region warns once.
        strict: raise `RematError` instead of warning.

    Example:
        >>> from remat import save_names
        >>> save_names("q", "k")
        save_names('k', 'q')
    """
    return ByName(_checked("save_names", names), Decision.SAVE, Decision.RECOMPUTE, strict, "save_names")


def save_all_but_names(*names: str, strict: bool = False) -> ByName:
    """Recompute values with one of these names; save everything else.

    Args:
        names: names given by `checkpoint_name`. One that never occurs in a region warns once.
        strict: raise `RematError` instead of warning.

    Raises:
        RematError: no name, or one that is not a string (also a TypeError).

    Example:
        >>> import torch
        >>> from remat import checkpoint_name, remat, save_all_but_names, saved_residuals
        >>> fn = remat(lambda x: checkpoint_name(x.sin(), "s").exp(), policy=save_all_but_names("s"))
        >>> [r.op.overloadpacket for r in saved_residuals(fn, torch.ones(3)) if r.op]
        [<OpOverloadPacket(op='aten.exp')>]
    """
    names_ = _checked("save_all_but_names", names)
    return ByName(names_, Decision.RECOMPUTE, Decision.SAVE, strict, "save_all_but_names")


def offload_names(*names: str, strict: bool = False) -> ByName:
    """Deprecated: `offload(save_names(...))`."""
    names_ = _checked("offload_names", names)
    return ByName(names_, Decision.OFFLOAD, Decision.RECOMPUTE, strict, "offload_names")


save_nothing = Constant("save_nothing", Decision.RECOMPUTE)
"""Keep only the inputs of the region. This is the default.

Example:
    >>> import torch
    >>> from remat import remat, save_nothing, saved_residuals
    >>> fn = remat(lambda w, x: torch.tanh(x @ w).exp(), policy=save_nothing)
    >>> saved_residuals(fn, torch.ones(4, 4), torch.ones(2, 4)).kept_bytes
    0
"""

save_everything = Constant("save_everything", Decision.SAVE)
"""Keep every value that the backward reads, as without remat.

Example:
    >>> import torch
    >>> from remat import remat, save_everything, saved_residuals
    >>> fn = remat(lambda w, x: torch.tanh(x @ w).exp(), policy=save_everything)
    >>> saved_residuals(fn, torch.ones(4, 4), torch.ones(2, 4)).kept_bytes
    64
"""

save_matmuls = OfKind("save_matmuls", ("matmul", "bmm", "convolution"))
"""Keep the results of matrix products and convolutions (JAX's `dots_saveable`).

Example:
    >>> import torch
    >>> from remat import remat, save_matmuls, saved_residuals
    >>> fn = remat(lambda w, x: torch.tanh(x @ w).exp(), policy=save_matmuls)
    >>> saved_residuals(fn, torch.ones(4, 4), torch.ones(2, 4)).kept_bytes
    32
"""

save_attention = OfKind("save_attention", ("attention",))
"""Keep the results of fused attention on every device, flex attention included.

Example:
    >>> import torch
    >>> from remat import remat, save_attention, saved_residuals
    >>> attention = torch.nn.functional.scaled_dot_product_attention
    >>> fn = remat(lambda x: attention(x, x, x).sin(), policy=save_attention)
    >>> [r.op.overloadpacket for r in saved_residuals(fn, torch.ones(1, 2, 8, 16)) if r.why == "policy"][:1]
    [<OpOverloadPacket(op='aten._scaled_dot_product_flash_attention_for_cpu')>]
"""

# All-reduces are kept too: without sequence parallelism they are what a reduce-scatter is with it, and their
# results are no larger than what they read. Policies of other kinds of ops keep none: a policy keeps what its
# name says.
save_collectives = OfKind("save_collectives", ("collective",))
"""Keep the results of reduce-scatters, all-to-alls and all-reduces, so that the backward does not send them
again. All-gathers run again, from the shard that they are made of: `save_ops` keeps those.

Example:
    >>> import torch
    >>> from remat import OpInfo, save_collectives
    >>> save_collectives(OpInfo(torch.ops._c10d_functional.reduce_scatter_tensor.default, (), {}, ()))
    <Decision.SAVE: 2>
    >>> save_collectives(OpInfo(torch.ops._c10d_functional.all_gather_into_tensor.default, (), {}, ()))
    <Decision.RECOMPUTE: 0>
"""

offload_matmuls = OfKind("offload_matmuls", ("matmul", "bmm", "convolution"), Decision.OFFLOAD)
"""Deprecated: `offload(save_matmuls)`."""
