"""Whether the ranks of a group agree on what a region keeps, in eager, under torch.func and in graphs.

A collective that runs again on some ranks of its group only waits for the others for ever. So where a region
runs collectives, the ranks of each group compare a hash of what they keep. They do so once, at the end of the
region's first forward, through the store by which they have met: no collective, and nothing on a device.
"""

from __future__ import annotations

import collections
import hashlib
import re
from typing import Any

from remat.transforms.compat import meeting_of
from remat.transforms.errors import RematError
from remat.transforms.ops import traits
from remat.transforms.tape import RECOMPUTE, Tape

# How many regions of this name have met so, in a group: what they meet under.
_met: collections.Counter[tuple[str, str]] = collections.Counter()
_SECONDS = 120
# Groups, regions and policies that were compared while a graph was traced.
_traced: set[tuple[str, str, str]] = set()


def agree(region: Any, recorder: Any) -> None:
    """Compare what `region` keeps with the other ranks, at the end of its first forward.

    Raises:
        RematError: on every rank of a group whose ranks keep other values, or where one does not come.
    """
    if region.key in region.cache.agreed:
        return
    said = _said_by(recorder)
    if not said:
        return
    region.cache.agreed.add(region.key)
    for name, mine in said.items():
        _compare(name, region.name, mine, _SECONDS)


def agree_traced(region: Any, record: Any) -> None:
    """The same for a region that is traced, once for its name: a graph that one rank alone traces again,
    for other shapes, is compared with nothing."""
    for name, mine in _said_by(record).items():
        key = name, region.name, mine[0]
        if key not in _traced:
            _traced.add(key)
            # Other ranks may be at work on the code of an earlier graph.
            _compare(name, f"{region.name} (traced)", mine, 5 * _SECONDS)


def _said_by(recorder: Any) -> dict[str, list[str]]:
    """By the names of groups, what has to be the same on all of their ranks."""
    groups = dict.fromkeys([str(node.args[-1]) for node in recorder.tape.nodes if _waits(node)])
    return {name: _kept(recorder, recorder.tape, name) for name in groups}


def _waits(node: Any) -> bool:
    """Whether an op is a collective that other ranks have to take part in."""
    return traits(node.op).functional and bool(node.args) and isinstance(node.args[-1], str)


def _kept(recorder: Any, tape: Tape, group: str) -> list[str]:
    """What has to be the same on all ranks: the collectives, whether each is kept, and the policy."""
    policy = repr(getattr(recorder.selector, "policy", "save_nothing")).strip("'")
    policy = re.sub(r" at 0x[0-9a-f]+", "", policy)
    said = [f"the policy {policy}"]
    said += [_said(node) for node in tape.nodes if _waits(node) and node.args[-1] == group]
    if not tape.sized_by_data:
        # Ranks may run other ops, such as those that pad: what counts is what becomes of one that both run.
        said += sorted({_said(node) for node in tape.nodes if node.verdict != RECOMPUTE})
    return said


def _said(node: Any) -> str:
    return f"{node.op} {'recomputed' if node.verdict == RECOMPUTE else 'kept'}"


def _compare(group: str, region: str, said: list[str], seconds: int) -> None:
    meeting = meeting_of(group, seconds)
    if meeting is None:
        return
    _met[meeting.name, region] += 1
    key = f"remat/{meeting.name}/{region}/{_met[meeting.name, region]}"
    mine = hashlib.sha256("\n".join(said).encode()).hexdigest()
    if meeting.all_say(key, mine, seconds):
        return
    for rank, other in meeting.told(key, "\n".join(said), seconds):
        theirs = other.split("\n")
        if theirs != said:
            pairs = zip([*said, "nothing more"], [*theirs, "nothing more"], strict=False)
            here, there = next((a, b) for a, b in pairs if a != b)
            raise RematError(
                f"region {region!r} keeps other values on other ranks: rank {meeting.rank} has {here}, rank "
                f"{rank} has {there}. A collective that only some ranks run again would wait for ever. Give "
                "every rank the same policy, one that does not ask for the rank."
            )
    raise RematError(
        f"region {region!r}: not all ranks of the group {meeting.ranks} came to the end of its first forward "
        f"within {seconds} s, or some keep other values. Every rank must run the same regions."
    )
