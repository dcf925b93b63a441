"""The rows of a sweep: what stands around each block."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import remat.policies
from remat._api import checkpoint_policy, remat as rematerialize
from remat.cli.errors import UsageError
from remat.cli.target import named
from remat.policies import Policy, as_policy
from remat.transforms import RematError

aten = torch.ops.aten
# Matrix products and convolutions, for torch's selective checkpointing: those that save_matmuls saves.
MATMULS = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
]


@dataclass(frozen=True)
class Row:
    """A name and a wrapper: `wrap(fn)` behaves as `fn`. A rival may fail; a row of ours may not."""

    name: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    rival: bool = False


def untouched(fn: Callable[..., Any]) -> Callable[..., Any]:
    """No remat."""
    return fn


def torch_checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch's checkpoint, which keeps nothing."""
    from torch.utils.checkpoint import checkpoint

    return partial(checkpoint, fn, use_reentrant=False)


def torch_sac(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch's selective checkpoint, which keeps the products."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    contexts = partial(create_selective_checkpoint_contexts, MATMULS)
    return partial(checkpoint, fn, use_reentrant=False, context_fn=contexts)


def remat_under(policy: Policy, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A region of ours."""
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
    "save_weight_matmuls",
    "save_attention",
    "save_matmuls | save_attention",
    "save_everything",
)


# Policies and their makers are those of `remat.policies` whose names begin so.
_BEGINNINGS = ("save_", "offload")


def rows(names: tuple[str, ...] = ()) -> list[Row]:
    """One row per name, `none` first whether named or not; without names, the default ones.

    A name is `none`, `torch_checkpoint`, `torch_sac`, or a policy as one writes it in Python:
    `save_matmuls`, `save_matmuls | save_attention`, `~save_attention`, `save_names("q", "k")`. Or it is a
    budget (`budget=0.4`, `budget=2GiB`, `peak=20GiB`), a plan (`plan=FILE`), names (`names=q,k`), or
    `MODULE:RULE`.

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
    """The row of one name; see `rows`."""
    if name == "none":
        return NONE
    if name in RIVALS:
        return RIVALS[name]
    policy = parse(name)
    return Row(repr(policy), partial(remat_under, policy))


def parse(text: str) -> Policy:
    """The policy that `text` denotes: a budget, names, a rule of the user's, or Python of policies alone."""
    option = re.fullmatch(r"(budget|peak|names|plan)=([^()]+)", text)
    if option:
        return from_option(*option.groups())
    if re.fullmatch(r"[\w./]+:[\w.]+", text):
        return from_rule(text)
    try:
        policy = evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError):
        policy = None
    if not isinstance(policy, Policy):
        raise UsageError(
            f"--policy {text!r} is no policy; write a name such as save_matmuls, {DEFAULT[-2]!r}, "
            "budget=0.4, plan=FILE, names=q,k, or MODULE:RULE"
        )
    return policy


def from_option(kind: str, value: str) -> Policy:
    """The policy of `budget=0.4`, `peak=20GiB`, `plan=FILE` or `names=q,k`."""
    if kind == "names":
        return remat.policies.save_names(*[name.strip() for name in value.split(",")])
    if kind == "plan":
        return from_plan(value)
    make: Any = checkpoint_policy
    return make(**{kind: amount(value)})


def amount(text: str) -> float | int | str:
    """A number with a point is a share, one without is bytes.

    Example:
        >>> from remat.cli.rows import amount
        >>> amount("0.4"), amount("1000"), amount("2GiB")
        (0.4, 1000, '2GiB')
    """
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        return text


def from_plan(path: str) -> Policy:
    """The plan that `remat plan --out` wrote."""
    from remat.plan import Plan

    try:
        return Plan.from_json(Path(path).read_text())
    except (OSError, UnicodeDecodeError, RematError) as error:
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UsageError(
            f"--policy plan={path}: {why}. Name a file of remat plan MODULE:FN --budget 0.4 --out FILE."
        ) from error


def from_rule(text: str) -> Policy:
    """The policy, rule or list of ops that `MODULE:RULE` names."""
    rule = named(text)
    try:
        return as_policy(rule)
    except RematError as error:
        raise UsageError(f"--policy {text} is no policy and no rule: {error}") from error


def evaluate(node: ast.expr) -> Any:
    """The value of an expression of policies: names, calls, `|`, `&`, `~`, constants; otherwise None."""
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
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            made = checkpoint_policy if name == "checkpoint_policy" else lookup(name)
            return made(*map(evaluate, args), **{str(k.arg): evaluate(k.value) for k in keywords})
    return None


def lookup(name: str) -> Any:
    """The policy, or maker of policies, of this name."""
    made = getattr(remat.policies, name, None) if name.startswith(_BEGINNINGS) else None
    if made is not None:
        return made
    known = [key for key in vars(remat.policies) if key.startswith(_BEGINNINGS)]
    near = difflib.get_close_matches(name, [*known, "none", *RIVALS], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(
        f"there is no policy {name!r}; {hint}Known are none, {', '.join([*RIVALS, *sorted(known)])}."
    )
