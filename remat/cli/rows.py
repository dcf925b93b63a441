"""The rows of a sweep: what stands around each block."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import remat.policies
from remat._api import remat as rematerialize
from remat.cli.errors import UsageError
from remat.policies import Policy

aten = torch.ops.aten
# The matrix products of a transformer, for torch's selective checkpointing: those that save_matmuls saves.
MATMULS = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default]


@dataclass(frozen=True)
class Row:
    """A name and a wrapper: `wrap(fn)` behaves as `fn`. A rival may fail; a row of ours may not."""

    name: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    rival: bool = False


def untouched(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def torch_checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    return partial(checkpoint, fn, use_reentrant=False)


def torch_sac(fn: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    contexts = partial(create_selective_checkpoint_contexts, MATMULS)
    return partial(checkpoint, fn, use_reentrant=False, context_fn=contexts)


def remat_under(policy: Policy, fn: Callable[..., Any]) -> Callable[..., Any]:
    return rematerialize(fn, policy=policy)


# The row that all others are compared with, and torch's own two.
NONE = Row("none", untouched)
RIVALS = {
    "torch_checkpoint": Row("torch_checkpoint", torch_checkpoint, rival=True),
    "torch_sac": Row("torch_sac", torch_sac, rival=True),
}
DEFAULT = (
    "none",
    "torch_checkpoint",
    "torch_sac",
    "save_nothing",
    "save_matmuls",
    "save_unbatched_matmuls",
    "save_attention",
    "save_matmuls | save_attention",
    "save_everything",
)


def rows(names: tuple[str, ...] = ()) -> list[Row]:
    """One row per name, `none` first whether named or not; without names, the default ones.

    A name is `none`, `torch_checkpoint`, `torch_sac`, or a policy as one writes it in Python:
    `save_matmuls`, `save_matmuls | save_attention`, `~save_attention`, `save_names("q", "k")`.

    Raises:
        UsageError: for a name that is none of these, with the nearest one that is.

    Example:
        >>> from remat.cli.rows import rows
        >>> [row.name for row in rows(("save_matmuls|save_attention",))]
        ['none', 'save_matmuls | save_attention']
    """
    made = [row(name) for name in names or DEFAULT]
    unique = {row.name: row for row in [NONE, *made]}
    return list(unique.values())


def row(name: str) -> Row:
    if name == "none":
        return NONE
    if name in RIVALS:
        return RIVALS[name]
    policy = parse(name)
    return Row(repr(policy), partial(remat_under, policy))


def parse(text: str) -> Policy:
    """The policy that `text` denotes: names, `|`, `&`, `~`, makers called with literals and policies."""
    try:
        policy = evaluate(ast.parse(text, mode="eval").body)
    except SyntaxError:
        policy = None
    if not isinstance(policy, Policy):
        raise UsageError(
            f"--policy {text!r} is no policy; write a name such as save_matmuls, or {DEFAULT[-2]!r}"
        )
    return policy


def evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name):
            return lookup(name)
        case ast.Constant(value=str() | int() | float() as value):
            return value
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return evaluate(left) | evaluate(right)
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return evaluate(left) & evaluate(right)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~evaluate(operand)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return lookup(name)(*map(evaluate, args))
    return None


def lookup(name: str) -> Any:
    known = [key for key in vars(remat.policies) if key.startswith(("save_", "offload_"))]
    if name in known:
        return getattr(remat.policies, name)
    near = difflib.get_close_matches(name, [*known, "none", *RIVALS], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UsageError(
        f"there is no policy {name!r}{hint}\nknown: none, {', '.join([*RIVALS, *sorted(known)])}"
    )
