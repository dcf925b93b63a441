"""Ranks of a group that compare what they say, through the store by which they have met."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import secrets
import time
import weakref
from collections.abc import Iterator
from typing import Any

from remat._torch import world_store


class Meeting:
    """A group of ranks, and the store by which it has met.

    Attributes:
        name: of the group as it has met this time, the same on all of its ranks.
        rank, ranks: this rank in the world, and those of the group.
    """

    def __init__(self, store: Any, rank: int, ranks: list[int]) -> None:
        self._store, self.rank, self.ranks = store, rank, ranks
        self.name = ",".join(map(str, ranks))

    def met(self, seconds: int) -> str:
        """A name for this time, empty where not all ranks came in so many seconds.

        The store of a job that was started again holds what was said before: each process says a number of
        its own, until all have the same numbers of all.
        """
        store, name, end = self._store, f"remat/{self.name}", time.monotonic() + seconds
        store.set(f"{name}/{self.rank}", secrets.token_hex(8))
        token, places = "", [f"{name}/{rank}" for rank in self.ranks]
        with contextlib.suppress(RuntimeError):  # it took too long
            store.wait(places, datetime.timedelta(seconds=seconds))
            while time.monotonic() < end:
                said = hashlib.sha256(b"".join(map(store.get, places))).hexdigest()
                if store.add(f"{name}/{said}", 0 if said == token else 1) == len(self.ranks):
                    return said
                token = said
                time.sleep(0.01)
        return ""

    def all_say(self, key: str, what: str, seconds: int) -> bool:
        """Whether all ranks say the same; waits until all have spoken, so many seconds at most."""
        store, count = self._store, len(self.ranks)
        store.add(f"{key}/{what}", 1)
        if store.add(f"{key}/count", 1) == count:
            store.set(f"{key}/done", "1")
        with contextlib.suppress(RuntimeError):  # it took too long
            store.wait([f"{key}/done"], datetime.timedelta(seconds=seconds))
        return store.add(f"{key}/{what}", 0) == count

    def end(self, key: str, what: str, seconds: int) -> bool | None:
        """Whether all ranks say the same, None where not all came in so many seconds.

        All ranks hear the same, those that come later too.
        """
        store, count, end = self._store, len(self.ranks), f"{key}/end"
        store.add(f"{key}/{what}", 1)
        if store.add(f"{key}/count", 1) == count:
            store.compare_set(end, "", "all came")
        try:
            store.wait([end], datetime.timedelta(seconds=seconds))
        except RuntimeError:  # it took too long
            store.compare_set(end, "", "some did not")
        if store.get(end) != b"all came":
            return None
        return store.add(f"{key}/{what}", 0) == count

    def leave(self, key: str, what: str) -> None:
        """Take back what this rank has said: nobody has heard it."""
        for place in (what, "count"):
            self._store.add(f"{key}/{place}", -1)

    def told(self, key: str, text: str, seconds: int) -> Iterator[tuple[int, str]]:
        """What every rank has to say, where they do not say the same; waits so many seconds for all."""
        self._store.set(f"{key}/text/{self.rank}", text)
        end = time.monotonic() + seconds
        for rank in self.ranks:
            place, left = f"{key}/text/{rank}", max(end - time.monotonic(), 0.1)
            with contextlib.suppress(RuntimeError):
                self._store.wait([place], datetime.timedelta(seconds=left))
                yield rank, self._store.get(place).decode()


# By the ranks of a group: the store by which they have met, and a name for that.
_tokens: dict[str, tuple[weakref.ref[Any], str]] = {}


def meeting_among(ranks: list[int], seconds: int) -> Meeting | None:
    """These ranks, None where there is nobody to meet; may wait so many seconds."""
    world = world_store() if len(ranks) > 1 else None
    if world is None:
        return None
    store, rank = world
    meeting = Meeting(store, rank, ranks)
    ref, token = _tokens.get(meeting.name, (None, ""))
    if ref is None or ref() is not store:
        if token := meeting.met(seconds):
            _tokens[meeting.name] = weakref.ref(store), token
    meeting.name += f"/{token}"
    return meeting
