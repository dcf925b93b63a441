"""A stage of the pipeline in numbers, and the cheapest choice of plans within its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from remat.plan.chain import Choice, Measure
from remat.plan.graph import CostModel, Graph, is_view
from remat.plan.joint import Joint
from remat.plan.layout.around import Share
from remat.plan.layout.fixed import Flow, fixed_lines
from remat.plan.layout.knapsack import Repeated, Totals, added, single
from remat.plan.layout.layout import Layout
from remat.plan.layout.local import Weight
from remat.plan.layout.trace import TracedModel
from remat.plan.solve import INF


class Kind:
    """Blocks that are alike: their plans, with prices and bytes."""

    def __init__(self, graph: Graph, model: CostModel) -> None:
        self.graph, joint = graph, graph.joint
        self.choices = Measure(graph, model, accumulating=True).choices()
        self.seconds = sum(0.0 if is_view(joint, op) else model.price(joint, op) for op in joint.ops)
        results = {joint.values[v].storage for v in joint.results}
        self.output = sum(joint.storages[s] for s in results if joint.owner[s] >= 0)
        arguments = [v for v in joint.values if v.producer < 0 and v.origin == "argument"]
        self.input = sum(v.bytes for v in arguments if v.dtype.is_floating_point)
        self._capped: dict[int, tuple[list[int], Repeated] | None] = {}

    @cached_property
    def waiting(self) -> int:
        """Bytes that a microbatch holds between its gradients of activations and those of parameters."""
        return _read_for_weights(self.graph.joint)

    def over(self, number: int) -> int:
        """The most bytes live in forward or backward under a plan, over what it keeps."""
        choice = self.choices[number]
        return max(choice.forward, choice.backward) - choice.kept

    def capped(self, most: int) -> tuple[list[int], Repeated] | None:
        """The plans that have at most so much live over what they keep; None where there are none."""
        if most not in self._capped:
            numbers = [k for k in range(len(self.choices)) if self.over(k) <= most]
            plans = [self.choices[k] for k in numbers]
            one = Repeated(single([c.kept for c in plans], [c.cost for c in plans])) if plans else None
            self._capped[most] = None if one is None else (numbers, one)
        return self._capped[most]


def _read_for_weights(joint: Joint) -> int:
    """What ops of the backward read that lead to parameters' gradients and nowhere else."""
    ends = zip(joint.gradients, joint.differentiated, strict=True)
    todo = [g for g, v in ends if joint.values[v].origin != "parameter"]
    needed: set[int] = set()
    while todo:
        op = joint.producers.get(todo.pop())
        if op is not None and not op.forward and op.outputs[0] not in needed:
            needed.update(op.outputs)
            todo += op.reads
    late = [op for op in joint.backward if not needed.intersection(op.outputs)]
    made = {joint.values[o].storage for op in late for o in op.outputs}
    read = {joint.values[v].storage for op in late for v in op.reads if joint.values[v].origin != "parameter"}
    return sum(joint.storages[s] for s in read - made)


@dataclass(frozen=True)
class StageChoice:
    """The plans of a stage.

    Attributes:
        picks: the plan of each block, by its number in the kind's choices.
        seconds: of a microbatch's forward and backward, recomputation included.
        recompute: seconds of that.
        kept: bytes of one microbatch.
        over: bytes live over what is kept, at most.
    """

    picks: tuple[int, ...]
    seconds: float
    recompute: float
    kept: int
    over: int


class Part:
    """Blocks `start` to `stop` as a stage."""

    def __init__(self, pipe: Pipe, stage: int, start: int, stop: int) -> None:
        self.pipe, self.stage, self.start, self.stop = pipe, stage, start, stop
        traced, layout = pipe.traced, pipe.layout
        self.kinds = [pipe.kinds[k] for k in traced.kinds[start:stop]]
        self.share: Share = traced.around.share(start, stop, pipe.model)
        self.flow = Flow(stage, self.kinds[0].input, self.kinds[-1].output)
        self.names = traced.names[start:stop]
        outer = [weight for weight, before in pipe.outer if self._has(before)]
        inner = [pipe.inner[name] for name in self.names]
        self.lines = fixed_lines(layout, self.flow, [outer, *inner])
        if waiting := layout.waiting(stage):
            self.lines["inputs of gradients that wait"] = waiting * sum(kind.waiting for kind in self.kinds)
        if traced.shared:
            self.lines["what all blocks read"] = layout.in_flight(stage) * traced.shared
        self.base = sum(kind.seconds for kind in self.kinds) + self.share.seconds

    def _has(self, before: int) -> bool:
        """Whether what is called after so many blocks belongs to this stage."""
        return self.start == 0 if before == 0 else self.start < before <= self.stop

    @cached_property
    def fixed(self) -> int:
        """Bytes whatever blocks keep."""
        return sum(self.lines.values())

    def best(self, memory: float) -> StageChoice | None:
        """The fastest choice that fits; None where none does."""
        flying = self.pipe.layout.in_flight(self.stage)
        room = memory - self.fixed - flying * self.share.kept
        found: tuple[float, int, Totals] | None = None
        for most in sorted({kind.over(k) for kind in set(self.kinds) for k in range(len(kind.choices))}):
            sums = self._sums(most)
            if sums is None:
                continue
            place = sums[-1].at_most((room - max(most, self.share.over)) / flying)
            if place >= 0 and (found is None or float(sums[-1].cost[place]) < found[0]):
                found = float(sums[-1].cost[place]), most, sums[-1]
                picks = self._picks(most, sums, place)
        return None if found is None else self.chosen(picks)

    def least(self) -> int:
        """The least bytes that the stage can do with."""
        flying = self.pipe.layout.in_flight(self.stage)
        each = [
            min(
                range(len(kind.choices)),
                key=lambda k, kind=kind: flying * kind.choices[k].kept + kind.over(k),
            )
            for kind in self.kinds
        ]
        return self.peak(self.chosen(tuple(each)))

    def chosen(self, picks: Sequence[int]) -> StageChoice:
        """What a choice of plans takes."""
        plans: list[Choice] = [kind.choices[k] for kind, k in zip(self.kinds, picks, strict=True)]
        again = sum(plan.cost for plan in plans)
        kept = sum(plan.kept for plan in plans) + self.share.kept
        over = max([self.share.over, *(kind.over(k) for kind, k in zip(self.kinds, picks, strict=True))])
        return StageChoice(tuple(picks), self.base + again, again, kept, over)

    def peak(self, chosen: StageChoice) -> int:
        """The most bytes on a rank of the stage."""
        return self.fixed + self.pipe.layout.in_flight(self.stage) * chosen.kept + chosen.over

    def _sums(self, most: int) -> list[Totals] | None:
        """The sums of all blocks under a limit, kind by kind; None where one has no plan under it."""
        found: list[Totals] = []
        for kind, count in Counter(self.kinds).items():
            capped = kind.capped(most)
            if capped is None:
                return None
            one = capped[1].of(count)
            found.append(added(found[-1], one) if found else one)
        return found

    def _picks(self, most: int, sums: list[Totals], place: int) -> tuple[int, ...]:
        """The plans behind a sum: of a kind's blocks those that keep least come first."""
        made: dict[Kind, list[int]] = {}
        counts = list(Counter(self.kinds).items())
        for k in range(len(counts) - 1, -1, -1):
            kind, count = counts[k]
            capped = kind.capped(most)
            assert capped is not None
            mine = int(sums[k].right[place]) if k else place
            place = int(sums[k].left[place]) if k else 0
            made[kind] = [capped[0][pick] for pick in capped[1].picks(count, mine)]
        waiting = {kind: iter(picks) for kind, picks in made.items()}
        return tuple([next(waiting[kind]) for kind in self.kinds])


class Pipe:
    """All that stages are made of."""

    def __init__(
        self, traced: TracedModel, layout: Layout, weights: dict[str, Weight], model: CostModel
    ) -> None:
        self.traced, self.layout, self.model = traced, layout, model
        self.kinds = [Kind(graph, model) for graph in traced.graphs]
        self.inner: dict[str, list[Weight]] = {name: [] for name in traced.names}
        self.outer: list[tuple[Weight, int]] = []
        for name, weight in weights.items():
            parts = name.split(".")
            around = (".".join(parts[:k]) for k in range(1, len(parts)))
            if (block := next((n for n in around if n in self.inner), None)) is not None:
                self.inner[block].append(weight)
            else:
                self.outer.append((weight, traced.outer.get(weight.owner, 0)))

    def split(self, memory: float) -> list[tuple[Part, StageChoice]] | None:
        """The stages, such that the slowest is as fast as can be; None where no split fits."""
        layout, count = self.layout, len(self.traced.names)
        if layout.split is not None:
            ends = [sum(layout.split[: k + 1]) for k in range(layout.pp)]
            parts = [Part(self, k, ends[k] - layout.split[k], ends[k]) for k in range(layout.pp)]
            chosen = [(part, best) for part in parts if (best := part.best(memory)) is not None]
            return chosen if len(chosen) == layout.pp else None
        tried = self._tried(memory)
        # By the blocks of the stages so far: the slowest of them, their squares (among equals the most even
        # split), and the starts of the stages.
        ways: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
        for stage in range(layout.pp):
            later: dict[int, tuple[float, float, tuple[int, ...]]] = {}
            last = stage == layout.pp - 1
            for start, (slowest, squares, starts) in ways.items():
                for stop in [count] if last else range(start + 1, count - (layout.pp - stage - 1) + 1):
                    seconds = tried(stage, start, stop)
                    if seconds < INF:
                        way = max(slowest, seconds), squares + seconds**2, (*starts, start)
                        later[stop] = min(later.get(stop, way), way)
            ways = later
        if count not in ways:
            return None
        ends = [*ways[count][2], count]
        made = [Part(self, k, ends[k], ends[k + 1]) for k in range(layout.pp)]
        return [(part, chosen) for part in made if (chosen := part.best(memory)) is not None]

    def _tried(self, memory: float) -> Callable[[int, int, int], float]:
        """The seconds of any stage: of equal ones once."""
        known: dict[object, float] = {}
        kinds, count = self.traced.kinds, len(self.traced.names)

        def seconds(stage: int, start: int, stop: int) -> float:
            mix = tuple(sorted(Counter(kinds[start:stop]).items()))
            ends = kinds[start], kinds[stop - 1]
            key = stage, mix, ends, start == 0, stop == count
            if key not in known:
                chosen = Part(self, stage, start, stop).best(memory)
                known[key] = INF if chosen is None else chosen.seconds
            return known[key]

        return seconds
