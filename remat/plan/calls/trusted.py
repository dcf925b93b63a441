"""Which policy a call was bound to before, by what the engine knows of the call anyway.

To look at a function and all that it reaches, before every call, takes longer than to follow a plan. So after
some calls that looked alike from outside, the next one gets their policy, if a forward under it is known. The
engine compares every op with the tape of that. Where a forward turns out to be another one, it is right, as
always; it keeps no more than the plan, and recomputes what was not planned. The next call is looked at; after
two such surprises, every one is.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from remat.plan.calls.keys import facts_of
from remat.policies import Policy
from remat.transforms import BoundedCache, Key, attributes, flatten, is_a, is_module, names_of
from remat.transforms.closure import swapping
from remat.transforms.intermediates import current

_trusts: weakref.WeakKeyDictionary[Any, Trust] = weakref.WeakKeyDictionary()
# So many surprises, and every call is looked at.
_MOST = 2
# Calls that are told apart: those of the layers of a model, where layers are arguments.
_ROOM = 256
# Calls that have to look alike before one is trusted.
ENOUGH = 3
_PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None)))


class Trust:
    """What is known of one function's calls, by their looks: how many in a row, what, and their policy."""

    __slots__ = ("__weakref__", "met_before", "surprises")

    def __init__(self) -> None:
        self.met_before: BoundedCache[Hashable, tuple[int, Any, Policy | None]] = BoundedCache(_ROOM)
        self.surprises = 0

    def look(self, fn: Callable[..., Any], policy: Policy, inputs: Any, signature: Any) -> Hashable | None:
        """How a call looks whose `signature` the engine knows; None where it has to be looked at."""
        if signature is None or self.surprises >= _MOST or current() or swapping():
            return None
        given = [(t.is_leaf, t.device) for t in inputs.tensors]
        others = [*_parts(fn), *[leaf for leaf in inputs.leaves if leaf is not None]]
        try:
            return Key(policy.key, signature, *given, *map(_seen, others))
        except TypeError:
            # Sizes of nested tensors are symbols, which have no hash.
            return None

    def of(self, look: Hashable) -> Any:
        """The policy of the calls before that looked like this one."""
        before = self.met_before.get(look)
        return None if before is None else before[2]

    def met(self, look: Hashable | None, known: Any, policy: Policy) -> None:
        """A call was looked at, and bound to this policy by what is known of such calls."""
        if look is None or known is None:
            return
        count, before, _ = self.met_before.get(look, (0, None, None))
        count = count + 1 if before is known else 1
        self.met_before[look] = count, known, policy if count >= ENOUGH else None

    def surprise(self) -> None:
        """A call was not what it looked like."""
        self.surprises += 1
        self.met_before.clear()


def trust_nobody() -> None:
    """Look at every call again: what they were bound to was made of other prices."""
    for trust in list(_trusts.values()):
        trust.met_before.clear()


def trust_in(anchor: Any) -> Trust:
    """The trust in the calls of the functions with this anchor."""
    found = _trusts.get(anchor)
    if found is None:
        found = _trusts[anchor] = Trust()
    return found


def _seen(value: Any) -> Hashable:
    """What is seen of a part of a function, or of an argument that is no tensor."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if issubclass(kind, torch.Tensor):
        return id(kind), *facts_of(value)
    return (id(value), (attributes(value) or {}).get("training")) if is_module(value) else id(value)


def _parts(fn: Callable[..., Any]) -> tuple[Any, ...]:
    """What is behind a function besides its code: of a method its object, what a function closes over."""
    if is_a(fn, functools.partial):
        return (*_parts(fn.func), *flatten((fn.args, fn.keywords))[0])
    if is_a(fn, types.MethodType):
        return (*_parts(fn.__func__), fn.__self__)
    if is_a(fn, types.FunctionType):
        try:
            return tuple([cell.cell_contents for cell in fn.__closure__ or ()])
        except ValueError:
            return (fn,)
    made_of = names_of(type(fn)).get("made_of")
    return (fn,) if made_of is None else tuple(flatten(made_of(fn))[0])
