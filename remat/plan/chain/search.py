"""The dynamic program of `chain`: least prices by the bytes that are left."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from remat.plan.chain.chain import Chain, Part
from remat.transforms.compat import functions_as_they_are, outside_all_modes

# Bytes are counted in this share of the peak.
_CELLS = 1 << 15


def best_parts(chain: Chain, limit: int, *, nested: bool = True) -> tuple[Part, ...] | None:
    """The cheapest parts found that keep within a peak of `limit` bytes; None where there are none.

    Where they are not to be `nested`, every part is a region of its own.
    """
    # Whatever modes of the user are on, such as a default device, these are numbers of the plan.
    with outside_all_modes(), functions_as_they_are():
        return _Search(chain, limit, nested).parts()


def packed(chain: Chain, limit: int) -> tuple[tuple[Part, ...] | None, float]:
    """The cheapest choice of each stage, and a bound on the price of any, however bytes were rounded."""
    with outside_all_modes(), functions_as_they_are():
        search = _Search(chain, limit, nested=False)
        parts = search.parts()
        # Of each stage half a cell may have been rounded away.
        spare = search.count + 1 if search.cell > 1 else 0
        return parts, float(search.top[0][limit // search.cell + spare])


@dataclass(frozen=True)
class _Way:
    """One way to go on: a step of a certain price, and the stages that it leaves to other searches.

    Attributes:
        part: the stages that it is for.
        cost: price of the step.
        least: bytes that must be left for it.
        taken: bytes that are gone for what comes after.
        stop: where what comes after ends, None where that runs for the first time.
        again: bytes that are gone for what runs again inside, None where nothing does.
    """

    part: Part
    cost: float
    least: int
    taken: int
    stop: int | None = None
    again: int | None = None


class _Search:
    def __init__(self, chain: Chain, limit: int, nested: bool) -> None:
        self.nested = nested
        self.chain, self.stages, self.limit = chain, chain.stages, limit
        self.count = len(self.stages)
        self.cell = max(1, -(-limit // _CELLS))
        # Sizes are rounded to the nearest: what is found is measured, and fewer cells are tried if need be.
        self.room = limit // self.cell + 2 * self.count
        # Equal runs of stages have equal prices.
        numbers: dict[Any, int] = {}
        self.kinds = [numbers.setdefault(stage, len(numbers)) for stage in self.stages]
        self.joined = [
            (start, stop, numbers.setdefault(plans, len(numbers)))
            for (start, stop), plans in chain.joined.items()
        ]
        self.found: dict[Any, torch.Tensor] = {}
        self.top = {self.count: torch.zeros(self.room + 1, dtype=torch.float64)}

    def parts(self) -> tuple[Part, ...] | None:
        """The best parts of the whole chain."""
        for start in reversed(range(self.count)):
            self.top[start] = self._least(self._first(start))
        left = self.room
        while left >= 0 and self.top[0][left] < math.inf:
            parts = self._followed(0, None, left)
            over = self.chain.peak(parts) - self.limit
            if over <= 0:
                return parts
            left -= max(1, over // self.cell)
        return None

    def _followed(self, start: int, stop: int | None, left: int) -> tuple[Part, ...]:
        """The parts behind the least price of stages, with so many cells left."""
        made: list[Part] = []
        end = self.count if stop is None else stop
        while start < end:
            ways = self._first(start) if stop is None else self._again(start, stop)
            way = min(ways, key=lambda way: self._at(way, left))
            part = way.part
            if way.again is not None:
                inside = self._followed(part.start, part.stop, left - self._cells(way.again))
                part = Part(part.start, part.stop, parts=inside)
            made.append(part)
            left -= self._cells(way.taken)
            start = part.stop
        return tuple(made)

    # -- steps ---------------------------------------------------------------------------------------------

    def _first(self, start: int) -> Iterator[_Way]:
        """What may begin at a stage in the first forward."""
        chain, count, held = self.chain, self.count, self.stages[start].input
        for stop in range(start + 1, count + 1):
            behind = chain.gradients(stop, count)
            for k, choice in enumerate(chain.plans(start, stop)):
                least = max(choice.backward + behind, choice.forward)
                yield _Way(Part(start, stop, k), choice.cost, least, choice.kept)
            if self.nested and stop > start + 1:
                part = Part(start, stop)
                yield _Way(part, 0.0, chain.nothing(start, stop), held, again=held + behind)

    def _again(self, start: int, stop: int) -> Iterator[_Way]:
        """What may begin at a stage when it runs again, its input being there."""
        chain, held = self.chain, self.stages[start].input
        for choice in chain.plans(start, stop)[:1]:
            yield _Way(Part(start, stop), choice.cost, chain.leanest(start, stop), 0, stop)
        for cut in range(start + 1, stop):
            part, behind, taken = Part(start, cut), chain.gradients(cut, stop), self.stages[cut].input
            cost, least = chain.whole(start, cut), chain.nothing(start, cut) - held
            yield _Way(part, cost, least, taken, stop, behind)
            if cut == start + 1:
                plain = self.stages[start].plain
                least = max(plain.backward + behind, plain.forward) - held
                yield _Way(part, cost, least, chain.beyond(part), stop)

    # -- prices --------------------------------------------------------------------------------------------

    def _cells(self, size: int) -> int:
        return (size + self.cell // 2) // self.cell

    def _terms(self, way: _Way) -> Iterator[tuple[torch.Tensor, int]]:
        """The prices of what a way leaves to others, and the cells that are gone for each."""
        part = way.part
        if way.again is not None:
            yield self._of(part.start, part.stop), self._cells(way.again)
        if way.stop is None:
            yield self.top[part.stop], self._cells(way.taken)
        elif part.stop < way.stop:
            yield self._of(part.stop, way.stop), self._cells(way.taken)

    def _at(self, way: _Way, left: int) -> float:
        """The price of a way and of what follows, with so many cells left."""
        total = way.cost if left >= self._cells(way.least) else math.inf
        for prices, gone in self._terms(way):
            total += float(prices[left - gone]) if left >= gone else math.inf
        return total

    def _price(self, way: _Way) -> torch.Tensor:
        """The same for every number of cells."""
        terms = list(self._terms(way))
        first = max(self._cells(way.least), *(gone for _, gone in terms), 0)
        found = torch.full((self.room + 1,), math.inf, dtype=torch.float64)
        if first <= self.room:
            found[first:] = way.cost
            for prices, gone in terms:
                found[first:] += prices[first - gone : self.room + 1 - gone]
        return found

    def _of(self, start: int, stop: int) -> torch.Tensor:
        """The least price to run stages again and backward, by the cells left over their input."""
        if (start, stop) not in self.found:
            inside = [(a - start, b - start, kind) for a, b, kind in self.joined if start <= a and b <= stop]
            key = tuple(self.kinds[start:stop]), tuple(sorted(inside))
            if key not in self.found:
                self.found[key] = self._least(self._again(start, stop))
            self.found[start, stop] = self.found[key]
        return self.found[start, stop]

    def _least(self, ways: Iterator[_Way]) -> torch.Tensor:
        return functools.reduce(torch.minimum, map(self._price, ways))
