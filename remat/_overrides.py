"""What a thread has all its regions do meanwhile: another policy, or no run at all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

from remat.policies import Policy

# Given a region's name, its policy and the arguments of a call: the policy that the call is to have.
Choose = Callable[[str, Policy, tuple[Any, ...], dict[str, Any]], Policy]

# Given a region's function, its policy and the arguments of a call: what the call returns, in a tuple of one,
# or None where the region is to run.
Stand = Callable[[Callable[..., Any], Policy, tuple[Any, ...], dict[str, Any]], "tuple[Any] | None"]


class Overrides(threading.local):
    choose: Choose | None = None
    stand: Stand | None = None
    traced: Policy | None = None


overrides = Overrides()


@contextlib.contextmanager
def _meanwhile(what: str, value: Any) -> Generator[None]:
    before = getattr(overrides, what)
    setattr(overrides, what, value)
    try:
        yield
    finally:
        setattr(overrides, what, before)


def under_policy(policy: Policy) -> AbstractContextManager[None]:
    """Let every region that this thread calls meanwhile have this policy, to compare it with its own."""
    return policies_by(lambda *_: policy)


def policies_by(choose: Choose) -> AbstractContextManager[None]:
    """Ask `choose` for the policy of every region that this thread calls meanwhile in eager code."""
    return _meanwhile("choose", choose)


def standing_for(stand: Stand | None) -> AbstractContextManager[None]:
    """Let `stand` answer every call of a region by this thread meanwhile in eager code."""
    return _meanwhile("stand", stand)


def traced_under(policy: Policy) -> AbstractContextManager[None]:
    """Let every region and scan that this thread traces meanwhile have this policy. What is compiled then
    must be compiled for that alone: `torch.compile` would find it again without the policy."""
    return _meanwhile("traced", policy)
