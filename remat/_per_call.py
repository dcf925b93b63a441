"""Regions whose policy is another one for some calls, as a budget is, and calls that are known already."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from remat.policies import Combined, Policy, bind
from remat.transforms import BoundedCache
from remat.transforms.entry import run
from remat.transforms.region import Region

# How many policies' regions are remembered.
_MOST = 32


class PerCallRegion:
    """A region whose policy is another one for some calls.

    Args:
        make: makes the region of a function under a policy.
        policy: what is bound to each call.
        region: the one of the function under that policy, for what calls have in common.
    """

    def __init__(self, make: Callable[..., Region], policy: Policy, region: Region) -> None:
        self.make, self.policy, self.region, self.fn = make, policy, region, region.function
        # What remembers the policies of calls by how they look, where one part of the policy has that.
        trusts = [part.trust for part in _parts(policy) if hasattr(part, "trust")]
        self.trust: Callable[[Any], Any] = trusts[0] if len(trusts) == 1 else _nobody
        # Calls that look alike are bound to one and the same policy; what is made of it is made once.
        self.made: BoundedCache[int, tuple[Policy, Region]] = BoundedCache(_MOST)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it."""
        trust = self.trust(self.region.anchor)
        if trust is None:
            return run(self._of(bind(self.policy, self.fn, args, kwargs)), args, kwargs)
        return run(self.region, args, kwargs, functools.partial(self._chosen, trust, args, kwargs))

    def _chosen(
        self, trust: Any, args: Any, kwargs: Any, inputs: Any = None, signature: Any = None
    ) -> Region:
        """The region of a call: that of calls that looked alike, if `trust` knows one and it was run."""
        look = trust.look(self.fn, self.policy, inputs, signature)
        if look is not None and (before := trust.of(look)) is not None:
            found = self._of(before)
            if found.was_run(signature):
                _known(before).trust = trust
                return found
        bound = bind(self.policy, self.fn, args, kwargs)
        trust.met(look, _known(bound), bound)
        return self._of(bound)

    def _of(self, policy: Policy) -> Region:
        if policy is self.policy:
            return self.region
        of, found = self.made.get(id(policy), (None, self.region))
        if of is not policy:
            found = self.make(self.fn, policy, self.region.name)
            self.made[id(policy)] = policy, found
        return found


def _parts(policy: Policy) -> list[Any]:
    """What a policy is made of, however deep."""
    if not isinstance(policy, Combined):
        return [policy]
    return [one for part in policy.parts().values() for one in _parts(part)]


def _known(policy: Policy) -> Any:
    """What is known of the calls that a policy was bound to."""
    return next((known for part in _parts(policy) if (known := getattr(part, "known", None))), None)


def _nobody(anchor: Any) -> None:
    """No trust: each call is bound anew."""
