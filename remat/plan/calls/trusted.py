"""Which policy a call was bound to before, by what can be seen of the call in a hurry.

To look at a function and all that it reaches, before every call, takes longer than to follow a plan. So after
some calls that looked alike from outside, the next one gets their policy. The engine compares every op with
the tape of those calls anyway. Where a forward turns out to be another one, it is right, as always; it keeps
no more than the plan, and recomputes what was not planned. The next call is looked at; after two such
surprises, every one is.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from remat._region import anchor
from remat.plan.calls.keys import modes
from remat.policies import Policy
from remat.transforms import BoundedCache, Key, flatten
from remat.transforms.closure import swapping
from remat.transforms.compat import in_transform, is_tracing

_trusts: weakref.WeakKeyDictionary[Any, Trust] = weakref.WeakKeyDictionary()
# So many surprises, and every call is looked at.
_MOST = 2
# Calls that are told apart: those of the layers of a model, where layers are arguments.
_ROOM = 256
# Calls that have to look alike before one is trusted.
_ENOUGH = 8
_PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None)))


class Known(Protocol):
    """What is known of calls; `trust`: what the call at hand was not looked at for, if anything."""

    trust: Trust | None


class Trust:
    """The policies of one function's calls, by how they look; `alike`: how many in a row had which."""

    __slots__ = ("__weakref__", "alike", "bound", "surprises")

    def __init__(self) -> None:
        self.bound: BoundedCache[Hashable, tuple[Known, Policy]] = BoundedCache(_ROOM)
        self.alike: BoundedCache[Hashable, tuple[int, Policy | None]] = BoundedCache(_ROOM)
        self.surprises = 0

    @property
    def lost(self) -> bool:
        """Whether calls are no longer what they look like."""
        return self.surprises >= _MOST

    def of(self, look: Hashable) -> Policy | None:
        """The policy of the calls before that looked like this one."""
        if (found := self.bound.get(look)) is None:
            return None
        known, policy = found
        known.trust = self
        return policy

    def met(self, look: Hashable, known: Known, policy: Policy) -> None:
        """A call was looked at, and bound to this policy."""
        known.trust = None
        if self.lost:
            return
        count, before = self.alike.get(look, (0, None))
        self.alike[look] = count, _ = (count + 1 if before is policy else 1), policy
        if count > _ENOUGH:
            self.bound[look] = known, policy

    def surprise(self) -> None:
        """A call was not what it looked like."""
        self.surprises += 1
        self.bound.clear()
        self.alike.clear()


def look_at(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Hashable
) -> tuple[Trust | None, Hashable]:
    """The trust in a function's calls, and how this one looks; None in traces and transforms."""
    if in_transform() or swapping() or is_tracing():
        return None, None
    while isinstance(fn, functools.partial):
        fn, args, kwargs = fn.func, (*fn.args, *args), fn.keywords | kwargs
    with_life_of = anchor(fn)
    trust = _trusts.get(with_life_of)
    if trust is None:
        trust = _trusts[with_life_of] = Trust()
    if trust.lost:
        return trust, None
    leaves, spec = flatten((args, kwargs))
    seen: list[Any] = [policy, spec, modes()]
    for value in (*_parts(fn), *leaves):
        kind = type(value)
        if isinstance(value, torch.Tensor):
            seen += (kind, value.shape, value.dtype, value.device, value.requires_grad, value.is_leaf)
        elif isinstance(value, torch.nn.Module):
            seen += (id(value), value.training)
        else:
            seen += (kind, value if kind in _PLAIN else id(value))
    try:
        return trust, Key(*seen)
    except TypeError:
        # Sizes of nested tensors are symbols, which have no hash.
        return None, None


def _parts(fn: Callable[..., Any]) -> tuple[Any, ...]:
    """A method's function and object, what a function closes over, or else the callable itself."""
    if isinstance(fn, types.MethodType):
        return fn.__func__, fn.__self__
    if not isinstance(fn, types.FunctionType):
        return (fn,)
    try:
        return tuple([cell.cell_contents for cell in fn.__closure__ or ()])
    except ValueError:
        return (fn,)
