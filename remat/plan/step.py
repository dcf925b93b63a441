"""A whole step in bytes: the regions of a model by their plans, and what lives outside of them.

The model is recorded with its regions left out, and each kind of region by itself. So the head, the loss, the
embedding and what regions share count as they do in the engine, and a deep model is traced about as fast as a
flat one. Bytes are those over what lives before the step, as in `peak`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from remat._core import format_bytes
from remat._inspect import looked_at
from remat.plan.calls import Met, RanRegions, Regions
from remat.plan.chain import Choice, Measure, Stage
from remat.plan.graph import CostModel, Graph, workspace
from remat.plan.joint import Hole, Joint, Op, planned_for, record_run
from remat.plan.peak import gradients_left, held_throughout, node_ends, sums_gradients, written_over
from remat.policies import Policy
from remat.transforms import RematError

# How gradients lie goes from region to region. Those alike learn it from one another: few times are enough.
_MEETINGS = 8


@dataclass(frozen=True)
class Beside:
    """The bytes outside of one region.

    Attributes:
        forward, backward: while the region's forward, and its backward, run.
        after: the most between its forward and that of the next one.
        before: the most between the backward of the next one and its own.
    """

    forward: int
    backward: int
    after: int
    before: int


@dataclass(frozen=True)
class WholeStep:
    """A step of a model.

    Attributes:
        names: of the regions, in the order of their forwards.
        graphs: of each region; what others hold costs nothing to keep there.
        owners: the modules whose forwards they are, None for other functions.
        outside: the graph of the model with its regions left out.
        shared: its storages that count there, whichever regions hold them.
        traced: how many regions were traced; the others are like one of them.
        accumulating: whether gradients are added to buffers that live before.
        shards: devices that share weights and gradients. A region's weights are whole while it runs, and
            those of the next one; those outside of regions always are.
        beside: regions that read the gradients of their results after these went into a sum, which is new.
        theirs: functions, or the modules whose forwards they are, that are called under saved-tensor hooks:
            what these keep counts outside, as it is.
        ran: whether it ran with data. Then other calls may run other ops: plans by position are no choice.
    """

    names: tuple[str, ...]
    graphs: tuple[Graph, ...]
    owners: tuple[Any, ...]
    outside: Joint
    shared: frozenset[int] = frozenset()
    traced: int = 0
    accumulating: bool = False
    shards: int = 1
    beside: frozenset[int] = frozenset()
    theirs: tuple[Any, ...] = ()
    ran: bool = False

    def deciding_again(self) -> WholeStep | None:
        """The same where regions may run their decisions again; None where they make none."""
        if not any(graph.joint.decisions for graph in self.graphs):
            return None
        return replace(self, graphs=tuple([graph.deciding_again() for graph in self.graphs]))

    @cached_property
    def places(self) -> tuple[Beside, ...]:
        """What lives outside of each region, where each keeps the arguments that others read as well."""
        return self._places(self._live)

    def _places(self, live: _Outside) -> tuple[Beside, ...]:
        base, places = self._base, map(live.place, range(len(self.graphs)))
        return tuple([Beside(*[size + base for size in astuple(place)]) for place in places])

    @cached_property
    def _live(self) -> _Outside:
        return self._outside(None)

    def _outside(self, needs: frozenset[tuple[int, int]] | None) -> _Outside:
        if needs not in self._made:
            self._made[needs] = _Outside(self.outside, self.accumulating, needs, self.shared)
        return self._made[needs]

    @cached_property
    def _made(self) -> dict[Any, _Outside]:
        return {}

    @property
    def _base(self) -> int:
        """Bytes of weights outside of regions that are gathered."""
        return _weights(self.outside) if self.shards > 1 else 0

    @cached_property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """How many backwards of its module come before a region's, and how many after.

        The gradients of several calls are added up first, and then to what lives before.
        """
        calls: dict[int, list[int]] = {}
        for at, owner in enumerate(self.owners):
            calls.setdefault(-1 - at if owner is None else id(owner), []).append(at)
        where = {at: (k, len(all) - 1 - k) for all in calls.values() for k, at in enumerate(reversed(all))}
        return tuple([where[at] for at in range(len(self.owners))])

    def measure(self, at: int, model: CostModel) -> Measure:
        """What plans of region `at` take."""
        return Measure(self.graphs[at], model, **self._options(at))

    def _options(self, at: int) -> dict[str, Any]:
        """How a region differs from others with its graph."""
        hole, (before, after) = self.outside.holes[at], self.turns[at]
        beyond = [k for k, v in enumerate(hole.cotangents) if self._live.beyond(hole, v)]
        return {
            "accumulating": before > 0 or (self.accumulating and not after),
            "anew": before == 1,
            # A residual connection holds the gradient of the result as well: it counts outside.
            "lent": () if at in self.beside else tuple(beyond),
        }

    def stages(self, model: CostModel, more: Callable[[Measure], Sequence[Choice]]) -> list[Stage]:
        """The regions in numbers, with what is outside of each; `more` gives further choices of a kind."""
        made: dict[Any, Stage] = {}
        found: list[Stage] = []
        for at, graph in enumerate(self.graphs):
            options = self._options(at)
            key = id(graph), tuple(options.values())
            if key not in made:
                measure = self.measure(at, model)
                stage = graph.solved.made(("stage", model, *options.values()), measure.stage)
                made[key] = replace(
                    stage,
                    choices=(*more(measure), *(() if self.ran else stage.choices)),
                    gradients=stage.gradients // self.shards,
                )
            stage = made[key]
            placed = [self.placed(at, choice) for choice in stage.choices]
            found.append(replace(stage, choices=tuple(placed), plain=self.placed(at, stage.plain)))
        return found

    def placed(self, at: int, choice: Choice) -> Choice:
        """A choice that takes the bytes outside along: the chain's sums are then those of the whole step."""
        forward, backward = choice.alone or (choice.forward, choice.backward)
        return self._moved(at, replace(choice, alone=(forward, backward)), self.places[at])

    def _moved(self, at: int, choice: Choice, place: Beside) -> Choice:
        assert choice.alone is not None
        gathered, (forward, backward) = self._gathered(self.graphs[at]), choice.alone
        after = choice.kept + place.after + self._cast(at, choice)
        return replace(
            choice,
            forward=max(forward + place.forward + gathered, after),
            backward=max(backward + place.backward + gathered, choice.kept + place.before),
        )

    def _cast(self, at: int, choice: Choice) -> int:
        """Bytes that autocast's cache holds from a region's forward to the end of the step's."""
        plain = not choice.saved and not choice.cost
        # Without a region nodes hold them; a module that is called again finds what is there.
        return 0 if plain or self.turns[at][1] else self.graphs[at].cast

    def _gathered(self, graph: Graph) -> int:
        """Bytes of weights that are whole while a region runs."""
        return 2 * _weights(graph.joint) if self.shards > 1 else 0

    def _needs(self, chosen: Sequence[Choice]) -> frozenset[tuple[int, int]]:
        """Which regions keep which of the arguments that others read as well: region and storage."""
        found: set[tuple[int, int]] = set()
        for at, (graph, choice, hole) in enumerate(zip(self.graphs, chosen, self.outside.holes, strict=True)):
            plain = not choice.saved and not choice.cost
            # Who keeps a part keeps all of the memory that it lies in.
            saved = graph.joint.held_by_nodes if plain else graph.memory_of(choice.saved)
            for k, v in enumerate(hole.operands):
                if graph.joint.values[k].storage in saved:
                    found.add((at, self.outside.values[v].storage))
            for inside, v in zip(_made(graph.joint), hole.made, strict=False):
                if graph.joint.values[inside].storage in saved:
                    found.add((at, self.outside.values[v].storage))
        return frozenset(found)

    def peak(self, chosen: Sequence[Choice]) -> int:
        """The most bytes live at once in a step, where region `k` is as `chosen[k]`, outside included."""
        return max(size for size, _ in self.course(chosen))

    def kept(self, chosen: Sequence[Choice]) -> int:
        """Bytes between forward and backward, outside included."""
        live = self._live
        return sum(choice.kept for choice in chosen) + live.at(live.forward, ()) + self._base

    def binding(self, chosen: Sequence[Choice], names: Sequence[str] = ()) -> str:
        """What lives at the peak, in words; `names` are those of the regions."""
        return max(self.course(chosen, names))[1]

    def course(self, chosen: Sequence[Choice], names: Sequence[str] = ()) -> Iterator[tuple[int, str]]:
        """The most live in each part of the step, over what lives before it, and what that is."""
        held, made, cast = 0, 0, 0
        live = self._outside(self._needs(chosen))
        before, after = [size + self._base for size in live.ends()]
        places = self._places(live)
        chosen = [self._moved(at, self.placed(at, c), places[at]) for at, c in enumerate(chosen)]
        called = names or [f"block {at}" for at in range(len(chosen))]
        yield before, "what is before the blocks"
        for at, choice in enumerate(chosen):
            size = held + cast + choice.forward
            yield size, f"the forward of {called[at]}, {format_bytes(held)} kept by those before"
            held += choice.kept
            cast += self._cast(at, choice)
        for at, choice in reversed(list(enumerate(chosen))):
            held -= choice.kept
            size, joint = held + made + choice.backward, self.graphs[at].joint
            kept = f"{format_bytes(held)} kept by those before, {format_bytes(made)} of gradients"
            yield size, f"the backward of {called[at]} or what is right before it, {kept}"
            left = sum(joint.storages[s] for s in gradients_left(joint)) // self.shards
            earlier, later = self.turns[at]
            if not earlier and (later or not self.accumulating):
                made += left
            elif earlier and not later and self.accumulating:
                made -= left
        yield (
            made + after,
            f"what is before the blocks in the backward, {format_bytes(made)} of gradients",
        )


def _weights(joint: Joint) -> int:
    """Bytes of the parameters that a graph reads."""
    held = (v for v in joint.values if v.origin == "parameter")
    return sum({v.storage: v.bytes for v in held}.values())


def step_of(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    wanted: Callable[[Policy], bool],
    device: Any = None,
    accumulating: bool = False,
    shards: int = 1,
) -> WholeStep:
    """Record a step without data: `wanted` says by a region's policy whether it is left out and planned."""
    regions, keywords = Regions(wanted), dict(kwargs)
    with planned_for(device):
        outside = regions.around(fn, args, keywords)
        traced = regions.traced
        for _ in range(_MEETINGS):
            if not regions.narrowed(outside):
                break
            # Results that nobody differentiates have no backward: another record begins with the others.
            outside = regions.around(fn, args, keywords)
    return _whole(regions, outside, traced, accumulating, shards)


def ran_step_of(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    wanted: Callable[[Policy], bool],
    device: Any = None,
    accumulating: bool = False,
    shards: int = 1,
) -> WholeStep:
    """The same from a step that runs, with data: its regions run again in the backward.

    Tensors that `fn` and its arguments can reach, modules and random streams are put back.
    """
    regions = RanRegions(wanted)
    with planned_for(device), looked_at(fn, args, kwargs, ops=False), regions.meeting():
        outside, _ = record_run(fn, args, dict(kwargs))
    return replace(_whole(regions, outside, len(regions.found), accumulating, shards), ran=True)


def _whole(regions: Regions, outside: Joint, traced: int, accumulating: bool, shards: int) -> WholeStep:
    """A step of these regions, and of what is outside of them."""
    found, storages = regions.found, list(outside.storages)
    for met, hole in zip(found, outside.holes, strict=False):
        # What autograd keeps for a result that nobody uses goes with it.
        places, size = met.gone
        if size:
            storages[outside.values[hole.made[places[0]]].storage] += size
    outside = replace(outside, storages=tuple(storages))
    if len(found) != len(outside.holes):
        raise RematError("The regions of this step are not all met outside of torch.func's transforms.")
    shared = frozenset(_shared(outside) | _kept_results(outside, [met.graph.joint for met in found]))
    returned = _Outside(outside, accumulating, None, shared).returned
    made: dict[Any, Graph] = {}

    def graph(at: int) -> Graph:
        met, hole = found[at].graph, outside.holes[at]
        free = tuple([_origin(outside, shared, v) for v in hole.operands])
        pairs = [
            (met.joint.values[v].storage, outside.values[out].storage)
            for v, out in zip(_made(met.joint), hole.made, strict=False)
        ]
        given = frozenset(s for s, out in pairs if out in shared)
        back = frozenset(s for s, out in pairs if out in returned[at])
        # A sum hands the same gradient to all that it is of.
        begun = [outside.values[v].storage for v in hole.cotangents]
        same = tuple(map(begun.index, begun))
        added = _added(outside, hole, met.joint)
        if not any(free) and not given and not added and len(set(begun)) == len(begun):
            return met
        key = id(met), free, given, back, same, added
        if key not in made:
            made[key] = met.solved.made(("freed", *key[1:]), lambda: _freed(met, *key[1:]))
        return made[key]

    return WholeStep(
        names=tuple(met.name for met in found),
        graphs=tuple(map(graph, range(len(found)))),
        owners=tuple(met.owner for met in found),
        outside=outside,
        shared=shared,
        theirs=tuple(regions.theirs),
        traced=traced,
        accumulating=accumulating,
        shards=shards,
        beside=frozenset([at for at, met in enumerate(found) if _beside(outside, outside.holes[at], met)]),
    )


def _shared(outside: Joint) -> set[int]:
    """The storages that others than one region hold until the backward."""
    readers: dict[int, set[int]] = {}
    for k, hole in enumerate(outside.holes):
        for v in hole.operands:
            readers.setdefault(outside.values[v].storage, set()).add(k)
    late = {outside.values[v].storage for op in outside.backward for v in op.reads}
    # Who keeps a part keeps all of the memory that it lies in; a result may be such a part.
    parts = {s for s in readers if len(outside.family[s]) > 1}
    return {s for s, who in readers.items() if len(who) > 1 or outside.owner[s] < 0 or s in late | parts}


def _made(joint: Joint) -> list[int]:
    """What a region makes and outlives it, in the order of `Hole.made`."""
    return [*joint.made, *[joint.family[s][0] for s in joint.stored]]


def _kept_results(outside: Joint, regions: Sequence[Joint]) -> set[int]:
    """The storages of results that their own region may keep as well, or that outlive the step."""
    found: set[int] = set()
    for joint, hole in zip(regions, outside.holes, strict=True):
        read = {*joint.held_by_nodes, *joint.stored}
        # Who keeps the value that a result is a part of keeps its memory.
        made = [joint.values[v] for v in joint.made]
        read |= {value.storage for value in made if value.bytes < joint.storages[value.storage]}
        pairs = zip(_made(joint), hole.made, strict=False)
        found |= {outside.values[out].storage for v, out in pairs if joint.values[v].storage in read}
    return found


def _origin(outside: Joint, shared: frozenset[int], operand: int) -> str | None:
    """What a region's argument is there to the region, None where it alone holds it."""
    value = outside.values[operand]
    if value.storage not in shared:
        return None
    return "leaf" if value.producer < 0 and operand in outside.differentiated else "elsewhere"


def _at_once(outside: Joint, hole: Hole) -> list[Op]:
    """What stands for the backward of a region, and the sums with the gradients that it makes."""
    ops = outside.ops[hole.backward :] if hole.backward >= 0 else ()
    nodes = {op.node for op in ops[:1]}
    return list(itertools.takewhile(lambda op: op.node in nodes, ops))


def _sums(outside: Joint, hole: Hole) -> set[int]:
    """The storages of sums, to each of which others have made a part when the region's backward begins."""
    sums = [op for op in _at_once(outside, hole) if sums_gradients(outside, op)]
    read = [{outside.values[v].storage for v in op.reads} for op in sums]
    return {s for places in read if min(outside.owner[s] for s in places) < hole.backward for s in places}


def _added(outside: Joint, hole: Hole, region: Joint) -> frozenset[int]:
    """The arguments of a region of whose gradients others have made a part."""
    made = [op.outputs[0] for op in _at_once(outside, hole) if op.target is _STANDS[0]]
    wanted = [k for k in region.differentiated if k < len(hole.operands)]
    if len(made) != len(wanted):
        return frozenset()
    sums = _sums(outside, hole)
    return frozenset([k for k, v in zip(wanted, made, strict=True) if outside.values[v].storage in sums])


def _parts(joint: Joint, added: Set[int]) -> tuple[list[int], list[int]]:
    """The positions of the sums that make the gradients of these arguments, and of what makes their parts."""
    todo = [g for g, k in zip(joint.gradients, joint.differentiated, strict=True) if k in added]
    sums, parts = list[int](), list[int]()
    while todo:
        at = joint.values[todo.pop()].producer
        if at >= 0 and sums_gradients(joint, joint.ops[at]):
            sums.append(at)
            todo += joint.ops[at].reads
        else:
            parts.append(at)
    return sums, parts


def _beside(outside: Joint, hole: Hole, met: Met) -> bool:
    """Whether a region reads the gradients of its results when a part of its own was added to these."""
    joint, mine = met.graph.joint, {outside.values[v].storage for v in hole.cotangents}
    parts = _parts(joint, _added(outside, hole, joint))[1]
    if not parts or mine.isdisjoint(_sums(outside, hole)):
        return False
    begun = {v.storage for v in joint.values if v.origin == "tangent"}
    reads = [{joint.values[v].storage for v in op.reads} for op in joint.ops]
    read = max(at for at, places in enumerate(reads) if places & begun)
    first = min(parts)
    return first < 0 or (read > first and joint.ops[read].node != joint.ops[first].node)


def _without_sums(joint: Joint, added: Set[int]) -> Joint:
    """The graph where each part of the gradients of these arguments goes into a sum of others at once."""
    ops, ends = list(joint.ops), list(joint.ends)
    for at in _parts(joint, added)[0]:
        for s in {joint.values[v].storage for v in ops[at].reads}.intersection(range(len(ends))):
            ends[s] = -1
        ops[at] = replace(ops[at], reads=(), outputs=())
    pairs = zip(joint.gradients, joint.differentiated, strict=True)
    left = [(g, k) for g, k in pairs if k not in added]
    gradients, differentiated = tuple([g for g, _ in left]), tuple([k for _, k in left])
    return replace(
        joint, ops=tuple(ops), ends=tuple(ends), gradients=gradients, differentiated=differentiated
    )


def _freed(
    graph: Graph,
    free: Sequence[str | None],
    given: frozenset[int],
    returned: frozenset[int],
    same: Sequence[int],
    added: frozenset[int],
) -> Graph:
    """The same region, some of whose arguments, their gradients and some of whose results others hold.

    `same`: for each gradient of a result the first one that is the same tensor. `added`: see `_added`.
    """
    values = list(graph.joint.values)
    begun = [k for k, value in enumerate(values) if value.origin == "tangent"]
    # Views of a gradient lie in its memory.
    one = {values[k].storage: values[begun[first]].storage for k, first in zip(begun, same, strict=False)}
    values = [replace(v, storage=one[v.storage]) if v.storage in one else v for v in values]
    for k, origin in enumerate(free):
        if origin is not None:
            values[k] = replace(values[k], origin=origin)
    joint = replace(_without_sums(graph.joint, added), values=tuple(values))
    return Graph(joint, graph.alone, given, returned, graph.every)


# The ops of a backward that was left out.
_STANDS = (torch.ops.aten.empty_strided.default, torch.ops.aten.copy_.default)


class _Outside:
    """When which storages outside of the regions are live: those that the step allocates.

    `needs`: which regions keep which of the arguments that others read as well; None where all do.
    """

    def __init__(
        self,
        joint: Joint,
        accumulating: bool,
        needs: frozenset[tuple[int, int]] | None,
        shared: frozenset[int],
    ) -> None:
        self.joint, self.holes, self.needs, self.shared = joint, joint.holes, needs, shared
        self.forward = len(joint.forward)
        self.end = len(joint.ops)
        self.spans = self._spans(accumulating)
        self.owned = self._owned()
        self.live = self._during()

    def _spans(self, accumulating: bool) -> dict[int, tuple[int, int]]:
        """The first and the last op of each storage."""
        joint, values = self.joint, self.joint.values
        last: dict[int, int] = {}
        nodes, known = node_ends(joint.ops), held_throughout(joint)
        for at, op in enumerate(joint.ops):
            for v in (*op.reads, *op.outputs, *op.beside):
                s = values[v].storage
                seen = known.get(s, -1)
                last[s] = max(last.get(s, -1), seen if seen >= at else nodes.get(op.node, at))
        every = dict(last)
        for hole in self.holes:
            for v in hole.operands:
                if (s := values[v].storage) in self.shared:
                    every[s] = max(every.get(s, -1), hole.forward, hole.backward)
        # Results that their own region alone holds when its backward begins.
        self.returned = [
            {s for v in hole.made if (s := values[v].storage) in self.shared and every[s] < hole.backward}
            for hole in self.holes
        ]
        for number, hole in enumerate(self.holes):
            for v in (*hole.operands, *hole.made):
                if (s := values[v].storage) in self.shared:
                    kept = self.needs is None or (number, s) in self.needs
                    last[s] = max(last.get(s, -1), hole.forward, hole.backward if kept else -1)
            for v in hole.cotangents:
                last[values[v].storage] = max(last.get(values[v].storage, -1), hole.backward - 1)
        ended = {values[v].storage for v in joint.results}
        left = {values[v].storage for v in joint.gradients} - (
            gradients_left(joint) if accumulating else set()
        )
        last |= dict.fromkeys(ended | left, self.end)
        self.until = dict(last)
        for at, op in enumerate(joint.ops):
            if last.get(summed := written_over(joint, op)) == at:
                # From there on the sum is in this memory.
                last[summed] = at - 1
        found = {s: (joint.owner[s], at) for s, at in last.items() if joint.owner[s] >= 0}
        # Who calls backward holds what it begins with.
        begun = {v.storage for v in values if v.origin == "tangent"}
        return found | dict.fromkeys(begun, (self.forward - 1, self.end))

    def _owned(self) -> dict[int, tuple[int, int]]:
        """From when to when a region counts a storage as its own."""
        shared, values = self.shared, self.joint.values
        return {
            values[v].storage: (hole.forward, max(hole.forward, hole.backward))
            for hole in self.holes
            for v in hole.operands
            if values[v].storage not in shared
        }

    def _during(self) -> list[int]:
        """Live bytes while each op runs."""
        change = [0] * (self.end + 2)

        def add(first: int, last: int, size: int) -> None:
            if first <= last:
                change[first] += size
                change[last + 1] -= size

        for s, (first, last) in self.spans.items():
            size = self.joint.storages[s]
            start, stop = self.owned.get(s, (self.end + 1, self.end + 1))
            add(first, min(last, start - 1), size)
            add(max(first, stop), last, size)
        total, found = 0, []
        for step, op in zip(change, self.joint.ops, strict=False):
            total += step
            found.append(total + workspace(self.joint, op))
        return found

    def at(self, boundary: int, without: tuple[int, ...], returned: Set[int] = frozenset()) -> int:
        """Live bytes between two ops, without what the region there counts: values, and storages."""
        joint, mine = self.joint, {self.joint.values[v].storage for v in without} | returned
        total = 0
        for s, (first, last) in self.spans.items():
            start, stop = self.owned.get(s, (self.end + 1, self.end + 1))
            if first < boundary <= last and not start <= boundary <= stop and s not in mine:
                total += joint.storages[s]
        return total

    def _most(self, first: int, last: int) -> int:
        return max(self.live[first:last], default=0)

    def beyond(self, hole: Hole, cotangent: int) -> bool:
        """Whether others hold the gradient of a region's result until after its backward."""
        s = self.joint.values[cotangent].storage
        ops, end = self.joint.ops, hole.backward
        # What stands for its backward makes the gradients of its operands, and then lets go of this one.
        while end < len(ops) and ops[end].target in _STANDS and ops[end].node == ops[hole.backward].node:
            end += 1
        # Regions whose backwards come later may begin with it.
        begun = (self.joint.values[v].storage for h in self.holes if h.backward >= end for v in h.cotangents)
        return self.until.get(s, -1) >= max(end, hole.backward) or (end > hole.backward and s in begun)

    def place(self, at: int) -> Beside:
        """What lives outside of region number `at`."""
        hole = self.holes[at]
        following = self.holes[at + 1].forward if at + 1 < len(self.holes) else self.forward
        earlier = max(
            [h.backward for h in self.holes[at + 1 :] if h.backward <= hole.backward] or [self.forward]
        )
        own = tuple([v for v in hole.cotangents if not self.beyond(hole, v)])
        return Beside(
            forward=self.at(hole.forward, ()),
            backward=self.at(hole.backward, own, self.returned[at]) if hole.backward >= 0 else 0,
            after=self._most(hole.forward, following),
            before=self._most(max(earlier, self.forward), hole.backward),
        )

    def ends(self) -> tuple[int, int]:
        """The most before the first region's forward, and after the last one's backward."""
        first = self.holes[0].forward if self.holes else self.forward
        last = max([h.backward for h in self.holes if h.backward >= 0] or [self.forward])
        return self._most(0, first), self._most(last, self.end)
