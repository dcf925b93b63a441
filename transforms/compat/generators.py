"""States of CPU generators, at most one in full for a run of small draws.

Such a state is that of a Mersenne Twister: 5,056 bytes, most of them 624 words that all draws share until the
generator has used them up and turns them over. So of most states it is enough to keep the 64 other bytes, and
after how many turns from an earlier state they came: Python's own Twister finds the words again. A state is
noted so only where it was seen to be the same, byte for byte, and wholly where not.
"""

from __future__ import annotations

import ctypes
import random
import struct
import threading
import weakref
from typing import Any

import torch

from remat.transforms.compat.ambient import functions_as_they_are

# CPUGeneratorImplState in ATen/CPUGeneratorImpl.cpp: seed, how many words are left and which is next, the
# words, and what is left of pairs of normal numbers.
_SIZE, _FIRST, _END = 5056, 24, 5016
_WORDS = struct.Struct("<624Q")
# So many turns lie between two states of a run, and in a whole run.
_NEXT, _MOST = 5, 16
# More numbers take more turns, and more memory than a state of their own.
_SMALL = 1248
_lock = threading.RLock()


class Start:
    """A state in full, from which a run of draws goes on. `seed`: of a generator that was just seeded."""

    __slots__ = ("__weakref__", "_shown", "seed", "words")

    def __init__(self, words: bytes, seed: int | None) -> None:
        self.seed, self.words = seed, words if seed is None else None
        self._shown: torch.Tensor | None = None

    def shown(self) -> torch.Tensor:
        """A tensor of its size, for reports."""
        if self._shown is None:
            self._shown = torch.empty(_END - _FIRST, dtype=torch.uint8)
        return self._shown


class Cursor:
    """A place in a run of draws: the words after some turns, empty until somebody asks."""

    __slots__ = ("start", "turns", "twister", "words")

    def __init__(self, start: Start, words: bytes, last: Cursor | None) -> None:
        """`last`: one that nobody needs any more."""
        self.start, self.turns, self.words = weakref.ref(start), 0, words
        self.twister = None if last is None else last.twister  # (a new one would seed itself)

    def turn(self, turns: int) -> None:
        """Go on by so many turns."""
        if turns:
            if not self.turns:
                self.twister = self.twister or random.Random(0)
                self.twister.setstate((3, (*_WORDS.unpack(self.words), 624), None))
            assert self.twister is not None
            self.twister.getrandbits(32 * 624 * turns)
            self.turns, self.words = self.turns + turns, b""

    def now(self) -> bytes:
        """The words here."""
        if not self.words:
            self.words = _WORDS.pack(*self._state()[:624])
        return self.words

    def is_at(self, words: bytes) -> bool:
        """Whether the words here are these."""
        if not self.words and self._state()[0] != int.from_bytes(words[:8], "little"):
            return False
        return self.now() == words

    def _state(self) -> tuple[int, ...]:
        assert self.twister is not None
        return self.twister.getstate()[1]


class CompactState:
    """The state of a CPU generator: that at the start of a run of draws, turned over so many times, and the
    bytes before and after the words."""

    __slots__ = ("rest", "start", "turns")

    def __init__(self, start: Start, turns: int, rest: bytes) -> None:
        self.start, self.turns, self.rest = start, turns, rest

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompactState) or self.rest != other.rest:
            return False
        if self.start is other.start:
            return self.turns == other.turns
        with _lock:
            return _words_of(self) == _words_of(other)

    __hash__ = None  # type: ignore[assignment]

    def takes(self) -> tuple[list[torch.Tensor], int]:
        """What it takes, for reports: its start, the same tensor for all that have it, and its own bytes."""
        return [] if self.start.words is None else [self.start.shown()], len(self.rest)


# The runs under way, by the ids of their generators, and the one that was drawn again last.
_runs: dict[int, Cursor] = {}
_again: list[Cursor] = []


def state_of(generator: torch.Generator) -> Any:
    """The state of a generator; `set_state` puts it back."""
    state = generator.get_state()
    if generator.device.type != "cpu" or state.nbytes != _SIZE:
        return state
    raw = _read(state)
    words, rest = raw[_FIRST:_END], raw[:_FIRST] + raw[_END:]
    with _lock:
        cursor = _runs.get(id(generator))
        start = None if cursor is None else cursor.start()
        if cursor is None or start is None or not _reaches(cursor, words):
            start = Start(words, _seed_of(raw))
            cursor = Cursor(start, words, _runs.pop(id(generator), None))
            _runs[id(generator)] = cursor
            if len(_runs) > 8:
                del _runs[next(iter(_runs))]
        return CompactState(start, cursor.turns, rest)


def has_drawn(generator: torch.Generator, numbers: int) -> None:
    """After an op: where it has drawn many numbers, the next state is noted in full."""
    if numbers > _SMALL:
        with _lock:
            _runs.pop(id(generator), None)


def set_state(generator: torch.Generator, state: Any) -> None:
    """Put back what `state_of` gave."""
    if not isinstance(state, CompactState):
        generator.set_state(state)
        return
    with _lock:
        words = _words_of(state)
    raw = state.rest[:_FIRST] + words + state.rest[_FIRST:]
    tensor = torch.default_generator.get_state()
    with functions_as_they_are():
        ctypes.memmove(tensor.data_ptr(), raw, _SIZE)
    generator.set_state(tensor)


def _reaches(cursor: Cursor, words: bytes) -> bool:
    """Whether these words come next in the run, by few turns."""
    if cursor.is_at(words):
        return True
    for _ in range(min(_NEXT, _MOST - cursor.turns)):
        cursor.turn(1)
        if cursor.is_at(words):
            return True
    return False


def _words_of(state: CompactState) -> bytes:
    if not _again or _again[0].start() is not state.start or _again[0].turns > state.turns:
        start = state.start
        words = start.words or _read(torch.Generator().manual_seed(start.seed or 0).get_state())[_FIRST:_END]
        _again[:] = [Cursor(start, words, _again[0] if _again else None)]
    _again[0].turn(state.turns - _again[0].turns)
    return _again[0].now()


def _seed_of(raw: bytes) -> int | None:
    """The seed of a generator that has drawn nothing since it was seeded."""
    seed, left, _, following = struct.unpack_from("<QiiQ", raw)
    if left != 1 or following:
        return None
    # (Seeds beyond 63 bits are given as negative numbers.)
    seed = seed - (1 << 64) if seed >> 63 else seed
    return (
        seed
        if _read(torch.Generator().manual_seed(seed).get_state())[_FIRST:_END] == raw[_FIRST:_END]
        else None
    )


def _read(state: torch.Tensor) -> bytes:
    with functions_as_they_are():  # no look of the user's
        return ctypes.string_at(state.data_ptr(), _SIZE)
