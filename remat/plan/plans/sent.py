"""Plans that send values to the host: speeds of links, and how such a plan is carried out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from remat._core import Decision, OpInfo
from remat.plan.plans.followed import Following, Known, carried_out
from remat.policies import Policy
from remat.transforms import Key, RematError
from remat.transforms.tape import Tape

if TYPE_CHECKING:
    from remat.plan.plans.plan import Plan

# Bytes/s that a copy between device and host attains in one direction, while the other is busy too.
LINKS = {"pcie4": 25e9, "pcie5": 55e9, "gh200": 380e9}


def speed_of(link: str | float) -> float:
    """Bytes per second of a link: a key of `LINKS`, or a number.

    Raises:
        RematError: anything else.
    """
    if isinstance(link, str) and link in LINKS:
        return LINKS[link]
    if isinstance(link, (int, float)) and not isinstance(link, bool) and link > 0:
        return float(link)
    raise RematError(
        f"A link is bytes per second or one of {', '.join(LINKS)}, got {link!r}: write link=55e9."
    )


class OffloadingPlan(Policy):
    """A plan carried out, some of whose values are kept on the host."""

    counts = planned = True

    def __init__(self, following: Following, sent: dict[int, frozenset[int]]) -> None:
        self.following, self.sent, self.known = following, sent, following.known
        self.where: dict[int, bool] = {}

    @property
    def key(self) -> Hashable:  # type: ignore[override]
        return Key(type(self), self.following.key, tuple(self.sent.items()))

    def fresh(self) -> Policy:
        fresh: Any = self.following.fresh()
        return type(self)(fresh, self.sent)

    def interleaved(self) -> Policy:
        other: Any = self.following
        return type(self)(other.interleaved() if hasattr(other, "interleaved") else other, self.sent)

    def finished(self, tape: Tape) -> None:
        self.following.finished(tape)

    def __call__(self, info: OpInfo) -> Decision:
        verdict = self.following(info)
        if info.index not in self.where:
            walk = self.following.walk
            sent = self.sent.get(id(walk.plan), frozenset())
            self.where[info.index] = verdict is Decision.SAVE and walk.at - 1 in sent
        return Decision.OFFLOAD if self.where[info.index] else verdict


def carried(plans: Sequence[Plan], known: Known | None = None) -> Policy:
    """The policy that carries plans out, those that send values to the host included."""
    following = carried_out(plans, known)
    sent = {id(plan): frozenset(plan.sent) for plan in plans if plan.sent}
    return OffloadingPlan(following, sent) if sent else following
