"""Which stages of a chain are recomputed together, and more than once, to keep within a peak.

A *part* of a chain is one region under a plan, or consecutive stages that keep nothing but the input of the
first. In the backward those run again, as parts of their own: stages deep inside run more than twice, and
fewer inputs are alive at a time. What is best for stages `i` to `k` depends on the bytes left to them and on
nothing else, so dynamic programming finds it. Parameters' gradients take bytes from the stages before.

Source: O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory", 2019 (arXiv:1911.13214). Theirs
keeps all of a stage or nothing; here a stage has plans to choose from where it runs for the first time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from remat.plan.chain.stages import Choice, Stage


@dataclass(frozen=True)
class Part:
    """Stages `start` to `stop` (not included) of a chain.

    Attributes:
        choice: of one region: the number of its plan; -1 for no region.
        parts: of what runs again as a whole: its parts then.
    """

    start: int
    stop: int
    choice: int = -1
    parts: tuple[Part, ...] = ()


class Chain:
    """Stages one after another, with what is alive where.

    Args:
        stages: in the order of the forward.
        joined: plans of several stages in one region, by where those start and stop.
    """

    def __init__(
        self, stages: Sequence[Stage], joined: Mapping[tuple[int, int], tuple[Choice, ...]] | None = None
    ) -> None:
        self.stages, self.joined = tuple(stages), joined or {}
        self._made = [0]
        self._work = [(0.0, 0.0)]
        for stage in self.stages:
            cost, flops = self._work[-1]
            self._made.append(self._made[-1] + stage.gradients)
            self._work.append((cost + stage.whole, flops + stage.flops))
        self.nothing = functools.cache(self._nothing)
        self._least_inside = functools.cache(self._find_least_inside)

    def gradients(self, start: int, stop: int) -> int:
        """Bytes of the parameters' gradients of these stages."""
        return self._made[stop] - self._made[start]

    def whole(self, start: int, stop: int) -> float:
        """Price of their forward."""
        return self._work[stop][0] - self._work[start][0]

    def plans(self, start: int, stop: int) -> tuple[Choice, ...]:
        """The plans for these stages as one region, the leanest first; none where that was not looked at."""
        return self.stages[start].choices if stop == start + 1 else self.joined.get((start, stop), ())

    def choice(self, part: Part) -> Choice:
        """What a part without parts does."""
        return (
            self.stages[part.start].plain
            if part.choice < 0
            else self.plans(part.start, part.stop)[part.choice]
        )

    # -- what given parts take -----------------------------------------------------------------------------

    def cost(self, parts: Sequence[Part]) -> float:
        """Price of all that runs again."""
        return self._total(parts, self.whole, lambda choice: choice.cost)

    def flops(self, parts: Sequence[Part]) -> float:
        """FLOPs of all that runs again."""
        work = self._work
        return self._total(parts, lambda a, b: work[b][1] - work[a][1], lambda choice: choice.flops)

    def _total(
        self, parts: Sequence[Part], whole: Callable[[int, int], float], of: Callable[[Choice], float]
    ) -> float:
        total = 0.0
        for part in parts:
            if not part.parts:
                total += of(self.choice(part))
                continue
            *before, last = part.parts
            total += sum(whole(p.start, p.stop) for p in before) + self._total(before, whole, of)
            # Of the last part the recomputation runs what the backward reads, and no more.
            total += of(self.plans(last.start, last.stop)[0])
        return total

    def kept(self, part: Part) -> int:
        """Bytes between forward and backward."""
        return self.stages[part.start].input if part.parts else self.choice(part).kept

    def peak(self, parts: Sequence[Part]) -> int:
        """The most bytes live at once in a forward and a backward through parts."""
        held = made = most = 0
        for part in parts:
            most = max(most, held + self._forward(part))
            held += self.kept(part)
        for part in reversed(parts):
            held -= self.kept(part)
            most = max(most, held + made + self.stages[part.start].input + self._backward(part))
            made += self.gradients(part.start, part.stop)
        return most

    def _forward(self, part: Part) -> int:
        return self.nothing(part.start, part.stop) if part.parts else self.choice(part).forward

    def _nothing(self, start: int, stop: int) -> int:
        """The most live in a forward that keeps nothing but its input, which is included."""
        one = self.stages[stop - 1]
        if stop == start + 1:
            return one.choices[0].forward
        return max(self.nothing(start, stop - 1), self.stages[start].input + one.choices[0].forward)

    def _backward(self, part: Part) -> int:
        """The most live in the backward of a part, over its input."""
        if not part.parts:
            return self.choice(part).backward - self.stages[part.start].input
        *before, last = part.parts
        held = most = 0
        for one in before:
            most = max(most, held + self._forward(one) - self.stages[one.start].input)
            held += self.beyond(one)
        most = max(most, held + self.leanest(last.start, last.stop))
        made = self.gradients(last.start, last.stop)
        for one in reversed(before):
            held -= self.beyond(one)
            most = max(most, held + made + self._backward(one))
            made += self.gradients(one.start, one.stop)
        return most

    def beyond(self, part: Part) -> int:
        """What a part that runs again keeps beside its input, with the input of the next."""
        own = 0 if part.parts else self.choice(part).kept - self.stages[part.start].input
        return own + self.stages[part.stop].input

    def leanest(self, start: int, stop: int) -> int:
        """The most live in the backward of stages of which nothing is kept, over their input."""
        return self.plans(start, stop)[0].backward - self.stages[start].input

    # -- the lowest peak -----------------------------------------------------------------------------------

    def lowest(self, *, nested: bool = True) -> int:
        """The lowest peak of all."""
        count = len(self.stages)
        least = [0] * (count + 1)
        for i in reversed(range(count)):
            found = []
            for stop in range(i + 1, count + 1):
                behind, kept = self.gradients(stop, count), self.stages[i].input
                found += [
                    max(c.kept + least[stop], behind + c.backward, c.forward) for c in self.plans(i, stop)
                ]
                if not nested:
                    continue
                again = behind + kept + self._least_inside(i, stop)
                found.append(max(kept + least[stop], again, self.nothing(i, stop)))
            least[i] = min(found)
        return least[0]

    def _find_least_inside(self, start: int, stop: int) -> int:
        """The fewest bytes over their input in which stages run again and backward."""
        found = [self.leanest(start, stop)] if self.plans(start, stop) else []
        for cut in range(start + 1, stop):
            forward = self.nothing(start, cut) - self.stages[start].input
            first = max(self._least_inside(start, cut) + self.gradients(cut, stop), forward)
            found.append(max(first, self.stages[cut].input + self._least_inside(cut, stop)))
        if stop > start + 1:
            one = Part(start, start + 1)
            behind = self._backward(one) + self.gradients(start + 1, stop)
            rest = self.beyond(one) + self._least_inside(start + 1, stop)
            found.append(max(behind, rest, self._forward(one) - self.stages[start].input))
        return min(found)
