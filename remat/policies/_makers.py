"""Policies from what users have at hand: a function, ops, names."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, cast

from remat._core import Decision, described
from remat.policies._base import FromCallable, Policy, PolicyError, converts
from remat.policies._modules import save_modules
from remat.policies._ready import (
    below,
    is_op,
    offload_names,
    save_all_but_names,
    save_names,
    save_nothing,
    save_ops,
)
from remat.policies._selective import offload, save_costlier_than, save_every_nth, save_larger_than, where

P = ParamSpec("P")
R = TypeVar("R")


@converts
def policy_from(value: Any) -> Policy:
    """See `remat.policies.as_policy`."""
    if isinstance(value, Policy):
        return value
    if advice := getattr(value, "no_policy", None):
        raise PolicyError(f"A {value.__class__.__name__} is not the policy of one region: {advice}")
    # Ops and classes are callable too, so they are told apart before plain functions.
    if is_op(value):
        return save_ops(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _from_collection(value)
    # A builtin is torch.mm, a mistaken op: a rule takes an OpInfo, which no builtin does.
    no_rule = isinstance(value, (type, types.BuiltinFunctionType)) or any(value is maker for maker in _MAKERS)
    if not callable(value) or no_rule:
        raise PolicyError(f"policy got {described(value)}. {_way_out(value)}")
    _check_rule(value)
    rule: Callable[..., Any] = value
    return FromCallable(rule)


def _check_rule(rule: Any) -> None:
    """Raise for a function that cannot be called with one `OpInfo`, such as a policy of JAX's shape."""
    bound = not isinstance(rule, types.FunctionType)
    function = rule if isinstance(rule, (types.FunctionType, types.MethodType)) else type(rule).__call__
    code = getattr(function, "__code__", None)
    # A decorator's wrapper takes anything, and hands it on.
    if code is None or hasattr(rule, "__wrapped__"):
        return
    taken = code.co_varnames[bound : code.co_argcount]
    given = function.__defaults__ or ()
    more = bool(code.co_flags & inspect.CO_VARARGS)
    if not taken if more else taken and len(taken) - len(given) <= 1:
        return
    takes = f"{', '.join(taken)}{' and more' if more else ''}" if taken else "no argument"
    if taken[:1] == ("ctx",):
        advice = "A policy function of torch's is turned into one by remat.interop.from_torch_policy(fn)."
    else:
        advice = (
            "JAX's take (prim, *avals, **params). Write lambda info: info.op is torch.ops.aten.mm.default, "
            "say. An OpInfo has the op, its arguments, its name and position."
        )
    raise PolicyError(
        f"policy got {described(rule)}, which takes {takes}: a rule here takes one OpInfo. {advice}"
    )


def policy_given(value: Any) -> Policy:
    """What `policy=value` means: as `as_policy`, and None recomputes everything, as in JAX."""
    return save_nothing if value is None else policy_from(value)


def several_given(who: str, values: Any) -> tuple[Policy, ...]:
    """What `policies=values` of `who` means: each as `policy=` is, and one alone is refused."""
    if isinstance(values, (Policy, str)) or not isinstance(values, Iterable):
        one = values if isinstance(values, Policy) else policy_from(values)
        raise PolicyError(f"{who}(policies={one!r}) takes several: write policies=[{one!r}].")
    return tuple(map(policy_from, cast("Iterable[Any]", values)))


def _from_collection(values: Any) -> Policy:
    names = [value for value in values if isinstance(value, str)]
    if ops_as_text := [name for name in names if name.startswith(("aten.", "torch."))]:
        raise PolicyError(
            f"policy got {ops_as_text[0]!r} in a list. Strings are names that checkpoint_name gave; an op is "
            "written as it is, such as torch.ops.aten.mm.default."
        )
    if policies := [value for value in values if isinstance(value, Policy)]:
        joined = " | ".join(map(repr, policies))
        raise PolicyError(
            f"policy got {policies[0]!r} in a {type(values).__name__}. Write policy={joined}: `|` saves what "
            "any of several policies saves."
        )
    ops = [value for value in values if not isinstance(value, str)]
    if not names:
        return save_ops(*ops)
    return save_names(*names) | save_ops(*ops) if ops else save_names(*names)


def _way_out(value: Any) -> str:
    if value is None:
        return "Write policy=save_nothing (recompute everything) or save_everything (as without remat)."
    if isinstance(value, str):
        named = f"policy=save_names({value!r}) to save the values that checkpoint_name gave that name"
        if place := place_of(value):
            return f"A string is not a policy: write policy={place} for the policy of that name, or {named}."
        return f"A string is not a policy: write {named}, or a built-in policy such as policy=save_matmuls."
    if isinstance(value, (bool, Decision)):
        return (
            "Write policy=save_everything (as without remat) or policy=save_nothing (recompute everything)."
        )
    if isinstance(value, int):
        return f"For a budget of bytes write policy=checkpoint_policy(budget={value})."
    if isinstance(value, float) and 0 <= value <= 1:
        return f"For a share of what no remat keeps write policy=checkpoint_policy(budget={value})."
    if isinstance(value, type):
        return f"A class is not a policy: write an instance, policy={value.__name__}(...)."
    if op := below(value):
        return f"A function of torch's is not an op: write policy=[{op}], the op below it."
    if isinstance(value, types.FunctionType):
        return f"{value.__name__} makes policies: call it, policy={value.__name__}(...)."
    return (
        "Write a built-in policy such as save_matmuls, a function from OpInfo to Decision, a list of ops "
        "such as [torch.ops.aten.mm.default], or save_names('q', 'k')."
    )


def place_of(name: str) -> str | None:
    """Where a policy or a factory of this name is found: here, or among JAX's names."""
    policies = vars(sys.modules["remat.policies"])
    room = "remat" if name in sys.modules["remat"].__all__ else "remat.policies"
    if isinstance(policies.get(name), Policy):
        return f"{room}.{name}"
    if any(maker.__name__ == name for maker in _MAKERS if maker.__name__ in policies):
        return f"{room}.{name}(...)"
    return f"remat.jax_names.checkpoint_policies.{name}" if name in JAX_NAMES else None


# JAX's policies without arguments, which people write where they mean ours.
JAX_NAMES = (
    "everything_saveable", "nothing_saveable", "dots_saveable", "checkpoint_dots",
    "dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims",
)  # fmt: skip


# Functions that make policies, which users take for policies.
_MAKERS: list[Callable[..., Any]] = [
    *(save_ops, save_names, save_all_but_names, offload_names, save_modules),
    *(where, offload, save_every_nth, save_larger_than, save_costlier_than),
]


def makes_policies(maker: Callable[P, R]) -> Callable[P, R]:
    """Tell of a policy factory that was passed instead of a policy, so that a message can say so."""
    _MAKERS.append(maker)
    return maker
