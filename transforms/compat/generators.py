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
from typing import Any, NamedTuple

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
_twister = random.Random(0)


class Start:
    """A state in full, from which a run of draws goes on. `seed`: of a generator that was just seeded."""

    __slots__ = ("__weakref__", "_shown", "_words", "seed")

    def __init__(self, words: bytes, seed: int | None) -> None:
        self.seed, self._words = seed, words if seed is None else None
        self._shown: torch.Tensor | None = None

    def words(self, turns: int) -> bytes:
        """The words after so many turns."""
        words = self._words or _read(torch.Generator().manual_seed(self.seed or 0).get_state())[_FIRST:_END]
        return _turned(words, turns) if turns else words

    def takes(self) -> list[torch.Tensor]:
        """For reports a tensor of its size; nothing where the seed is all that is kept."""
        if self._words is None:
            return []
        if self._shown is None:
            self._shown = torch.empty(_END - _FIRST, dtype=torch.uint8)
        return [self._shown]


class CompactState(NamedTuple):
    """The state of a CPU generator: that at the start of a run of draws, turned over so many times, and the
    bytes before and after the words."""

    start: Start
    turns: int
    rest: bytes

    def takes(self) -> tuple[list[torch.Tensor], int]:
        """What it takes, for reports: its start, the same tensor for all that have it, and its own bytes."""
        return self.start.takes(), len(self.rest)

    def same(self, other: Any) -> bool:
        """Whether another state is this one."""
        if not isinstance(other, CompactState) or self.rest != other.rest:
            return False
        return self[:2] == other[:2] or self.start.words(self.turns) == other.start.words(other.turns)


# The runs under way, by the ids of their generators: start, turns since, words.
_runs: dict[int, tuple[weakref.ref[Start], int, bytes]] = {}


def state_of(generator: torch.Generator) -> Any:
    """The state of a generator; `set_state` puts it back."""
    state = generator.get_state()
    if generator.device.type != "cpu" or state.nbytes != _SIZE:
        return state
    raw = _read(state)
    words, rest = raw[_FIRST:_END], raw[:_FIRST] + raw[_END:]
    with _lock:
        before, last, known = _runs.pop(id(generator), (None, 0, b""))
        start = None if before is None else before()
        turns = None if start is None else _turns_to(known, words, _MOST - last)
        if start is None or turns is None:
            start, last, turns = Start(words, _seed_of(raw)), 0, 0
        _runs[id(generator)] = weakref.ref(start), last + turns, words
        if len(_runs) > 8:
            del _runs[next(iter(_runs))]
        return CompactState(start, last + turns, rest)


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
    raw = state.rest[:_FIRST] + state.start.words(state.turns) + state.rest[_FIRST:]
    tensor = torch.default_generator.get_state()
    with functions_as_they_are():
        ctypes.memmove(tensor.data_ptr(), raw, _SIZE)
    generator.set_state(tensor)


def _turned(words: bytes, turns: int) -> bytes:
    with _lock:
        _twister.setstate((3, (*_WORDS.unpack(words), 624), None))
        _twister.getrandbits(32 * 624 * turns)
        return _WORDS.pack(*_twister.getstate()[1][:624])


def _turns_to(known: bytes, words: bytes, most: int) -> int | None:
    """By how many turns these words come next in a run, None where they do not, or by many."""
    for turns in range(min(_NEXT, most) + 1):
        if known == words:
            return turns
        known = _turned(known, 1)
    return None


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
