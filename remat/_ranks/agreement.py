"""Whether the ranks of a group agree on what a region keeps, in eager, under torch.func and in graphs.

A collective that runs again on some ranks of its group only waits for the others for ever. So where a region
runs collectives, the ranks of each group compare a hash of what they keep. They do so at the end of the
region's first forward, through the store by which they have met: no collective, and nothing on a device.

Later calls compare only where what they do with collectives is new to the region. What is known has been
compared, so it is known to all: a rank that comes alone does what the others do not. Steady steps ask nobody.

Collectives that write into their arguments, as those by which FSDP gathers, are never kept: a region with
them runs again as a whole, whatever else it keeps. Its ranks have data of their own, so ops and shapes may
differ. There the policies are compared, and what becomes of ops that several ranks run alike.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import Any

from remat._ranks.meeting import meeting_among
from remat._torch import process_group
from remat.transforms import RematError, metas, traits
from remat.transforms.tape import RECOMPUTE, Tape

# How many regions of this name have met so, in a group: what they meet under.
_met: collections.Counter[tuple[str, str]] = collections.Counter()
_SECONDS = 120
COMPILING = 5  # so many times longer, where other ranks may be at work on compiled code
# For what the others have to say, once all have come or have not.
_TOLD = 10
# Ranks of which some did not come.
_given_up: set[tuple[int, ...]] = set()
# By groups, regions and policies: what was compared while a graph was traced.
_traced: dict[tuple[str, str, str], set[str]] = {}


def meeting_number(meeting: Any, name: str) -> str:
    """What ranks meet under that have met under this name as often."""
    _met[meeting.name, name] += 1
    return f"remat/{meeting.name}/{name}/{_met[meeting.name, name]}"


def agree(region: Any, recorder: Any, again: bool = False, runs: frozenset[int] | None = None) -> bool:
    """Compare what `region` keeps with the other ranks, at the end of its first forward.

    Args:
        again: whether to do so after later ones, too.
        runs: the ops that its backward runs again, None where that is not known.

    Returns:
        whether other ranks depend on that.

    Raises:
        RematError: on every rank of a group whose ranks keep other values, or where one does not come.
    """
    known = region.cache.agreed.get(region.key)
    new: set[str] = set()
    for name, (mine, loose) in _said_by(recorder, runs).items():
        sends = _sends(recorder, name, runs)
        if known is None or again:
            _compare(name, region.name, mine, _SECONDS, loose)
        else:
            _compare_new(name, region.name, sends, known, _SECONDS)
        new.add(_digest(name, sends))
    if new:
        # Where ranks did not agree, all of them ask again.
        region.cache.agreed[region.key] = new | (known or set())
    return bool(new) or known is not None


def agree_traced(region: Any, record: Any) -> bool:
    """The same for a region that is traced, by its name: a graph that one rank alone traces again, for other
    shapes, is compared with nothing while it does the same with collectives."""
    said = _said_by(record)
    for name, (mine, loose) in said.items():
        key, label, sends = (name, region.name, mine[0]), f"{region.name} (traced)", _sends(record, name)
        if (known := _traced.get(key)) is None:
            _compare(name, label, mine, COMPILING * _SECONDS, loose)
        else:
            _compare_new(name, label, sends, known, COMPILING * _SECONDS)
        _traced[key] = (known or set()) | {_digest(name, sends)}
    return bool(said)


def wrong_anywhere(ranks: Sequence[int], name: str, wrong: str | None) -> str | None:
    """What is wrong on any of these ranks, the first of them that has something; all of them must ask.

    Who does not come in two minutes is not waited for again.
    """
    meeting = meeting_among(list(ranks), _SECONDS) if tuple(ranks) not in _given_up else None
    if meeting is None:
        return wrong
    key = meeting_number(meeting, name)
    if meeting.all_say(key, "wrong" if wrong else "fine", _SECONDS) and wrong is None:
        return None
    told = dict(meeting.told(key, wrong or "", _TOLD))
    if len(told) < len(ranks):
        _given_up.add(tuple(ranks))
    return next((said for said in told.values() if said), wrong)


def _said_by(recorder: Any, runs: frozenset[int] | None = None) -> dict[str, tuple[list[str], bool]]:
    """By the names of groups, what has to be the same on all of their ranks; or, where it says so, what must
    not differ."""
    tape = recorder.tape
    groups = dict.fromkeys([str(node.args[-1]) for node in tape.nodes if _waits(node)])
    said = {name: (_kept(recorder, tape, name, runs), False) for name in groups}
    if others := sorted(tape.groups - groups.keys()):
        said |= dict.fromkeys(others, (loosely(recorder, tape), True))
    return said


def _waits(node: Any) -> bool:
    """Whether an op is a collective that other ranks have to take part in."""
    return traits(node.op).functional and bool(node.args) and isinstance(node.args[-1], str)


def _kept(recorder: Any, tape: Tape, group: str, runs: frozenset[int] | None) -> list[str]:
    """What has to be the same on all ranks: the collectives, whether each is kept, and the policy."""
    said = [_policy(recorder), *_sends(recorder, group, runs)]
    if not tape.sized_by_data:
        # Ranks may run other ops, such as those that pad: what counts is what becomes of one that both run.
        said += sorted({_said(node) for node in tape.nodes if node.verdict != RECOMPUTE})
    return said


def _sends(recorder: Any, group: str, runs: frozenset[int] | None = None) -> list[str]:
    """The collectives that the ranks of a group wait in, and whether each runs again: what all must do alike.

    That depends on the other ops of a rank, too: a result that no gradient there reads is not made again.
    """
    found = [(at, node) for at, node in enumerate(recorder.tape.nodes) if _waits(node)]
    return [
        _said(node) if runs is None else f"{node.op} {'run again' if at in runs else 'not run again'}"
        for at, node in found
        if node.args[-1] == group
    ]


def loosely(recorder: Any, tape: Tape) -> list[str]:
    """What ranks with data of their own have in common: the policy, and for ops of these shapes its verdicts.

    A policy that counts is asked about the ops before, too: plans are, which are made for shapes.
    """
    policy = getattr(recorder.selector, "policy", None)
    if getattr(policy, "planned", False):
        return ["a plan"]
    if getattr(policy, "counts", False):
        return [_policy(recorder)]
    verdicts: dict[str, set[str]] = {}
    for node in tape.nodes:
        if not tape.passes(node):
            shapes = [list(meta[0]) for meta in metas(node.outs)]
            verdicts.setdefault(f"{node.op} of {shapes}", set()).add(_said(node).rpartition(" ")[2])
    return [_policy(recorder), *(f"{op} {' or '.join(sorted(v))}" for op, v in sorted(verdicts.items()))]


def _policy(recorder: Any) -> str:
    policy = repr(getattr(recorder.selector, "policy", "save_nothing")).strip("'")
    return f"the policy {re.sub(r' at 0x[0-9a-f]+', '', policy)}"


def _said(node: Any) -> str:
    return f"{node.op} {'recomputed' if node.verdict == RECOMPUTE else 'kept'}"


def first_difference(here: list[str], there: list[str], loose: bool) -> tuple[str, str] | None:
    """What two ranks say otherwise; `loose`: where both say anything."""
    if loose and here[0] == there[0]:
        known = {line.rpartition("] ")[0]: line for line in there[1:]}
        other = [(line, known.get(line.rpartition("] ")[0], line)) for line in here[1:]]
        return next((pair for pair in other if pair[0] != pair[1]), None)
    pairs = zip([*here, "nothing more"], [*there, "nothing more"], strict=False)
    return next(((a, b) for a, b in pairs if a != b), None)


def _digest(group: str, said: list[str]) -> str:
    return hashlib.sha256("\n".join([group, *said]).encode()).hexdigest()


def _compare_new(group: str, region: str, sends: list[str], known: set[str], seconds: int) -> None:
    """Compare what a later call does with collectives, where no call before did the same."""
    if sends and _digest(group, sends) not in known:
        _compare(group, region, sends, seconds, False, known)


def _compare(
    group: str, region: str, said: list[str], seconds: int, loose: bool, known: set[str] | None = None
) -> None:
    meeting = meeting_among(process_group(group), seconds)
    if meeting is None:
        return
    # What is known is the same on all ranks.
    about = region if known is None else f"{region}/{_digest(group, sorted(known))}"
    key, mine = meeting_number(meeting, about), _digest(group, said)
    if meeting.all_say(key, mine, seconds):
        return
    told = {rank: text.split("\n") for rank, text in meeting.told(key, "\n".join(said), _TOLD)}
    # This rank's differences first; but where any two differ, all raise.
    pairs = [(meeting.rank, rank) for rank in told] + list(itertools.combinations(told, 2))
    for one, other in pairs:
        if (found := first_difference(told.get(one, said), told[other], loose)) is not None:
            raise RematError(
                f"region {region!r} keeps other values on other ranks: rank {one} has {found[0]}, rank "
                f"{other} has {found[1]}. A collective that only some ranks run again would wait for ever. "
                "Give every rank the same policy, one that does not ask for the rank."
            )
    if loose and len(told) == len(meeting.ranks):
        return
    if known is not None:
        # Or a rank that comes alone later would take this one to have come with it.
        meeting.leave(key, mine)
        _met[meeting.name, about] -= 1
        new = ", ".join(dict.fromkeys(said))
        raise RematError(
            f"region {region!r} does on rank {meeting.rank} what it did in no call before: {new}. Not all "
            f"ranks of the group {meeting.ranks} did something new in this call within {seconds} s. Those "
            "that did not now wait for this rank. A collective that only some ranks run again would wait for "
            "ever. Let every rank run the same ops in each call, under a policy whose answers are the same."
        )
    raise RematError(
        f"region {region!r}: not all ranks of the group {meeting.ranks} came to the end of its first forward "
        f"within {seconds} s, or some keep other values. Every rank must run the same regions."
    )
