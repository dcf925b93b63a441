"""Live bytes through a step, simulated from the joint graphs: what a byte budget means for the peak.

The model is that of the engine. Between passes a region holds what its plan keeps. In its backward it
first goes through its forward again, then differentiates. What it kept goes as it is read. It stays until the
end where an argument is gone that all could be made from anew, or where a backward may come from some results
only. In a compiled backward what runs again does so right before its first reader.
A storage lives from the op that allocates it to its last reader. What libraries take inside on a CPU
counts. Other workspaces and allocator rounding do not, nor what lives before the step (parameters, inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from remat.plan.graph import Graph, workspace
from remat.plan.joint import Joint, Op, Ref
from remat.plan.solve import Solution
from remat.transforms import RematError, traits, tree_leaves

T = TypeVar("T")
_aten = torch.ops.aten
_ADD = _aten.add.Tensor
_SCATTERS = (_aten.scatter_add.default, _aten.scatter.src, _aten.scatter.value, _aten.index_add.default)
_SCATTERS += (_aten.index_put.default, _aten.index_copy.default, _aten.masked_scatter.default)
_ZEROS = ("zeros", "new_zeros", "zeros_like")
_CELLS, _HALVINGS = 16, 5


@dataclass(frozen=True)
class Profile:
    """Live bytes of one region under a plan.

    Attributes:
        kept: between its forward and its backward.
        forward: the most that is live at once in its forward, results and kept values included.
        backward: the most in its recomputation and backward: kept values, the gradients of its results and
            those that it makes included.
        gradients: of parameters and captured tensors, which outlive the backward.
    """

    kept: int
    forward: int
    backward: int
    gradients: int


def profile(graph: Graph, solution: Solution, **options: Any) -> Profile:
    """Simulate one region that keeps `solution.saved` (as `Graph.problem` numbers it).

    Args:
        options: as for `simulated`.
    """
    kept, saved = fresh(graph, solution.saved), solution.saved
    every = (graph.every or graph).joint  # the engine knows of no result that nobody uses
    stays = not options.get("compiled") and (several_results(every) or not graph.lent <= saved)
    return simulated(graph, kept, saved, solution.replayed, solution.bytes, stays=stays, **options)


def simulated(
    graph: Graph,
    kept: set[int],
    saved: Set[int],
    replayed: Set[int],
    size: int,
    *,
    lent: Collection[int] = (),
    compiled: bool = False,
    accumulating: bool = False,
    anew: bool = False,
    stays: bool = False,
) -> Profile:
    """Simulate a forward after which these storages are kept, with inputs `size` bytes, and its backward.

    Args:
        lent: which gradients of its results are not counted: they live before, and longer.
        compiled: the backward is a compiled one, where what runs again does so right before its first reader.
        accumulating: parameters' gradients are added to buffers that live before, and go at once.
        anew: so they are, but the buffers are gradients of one other call: see `summed_anew`.
        stays: what is kept goes with the region's backward, not as it is read.
    """
    joint, before, order = graph.joint, graph.ops, backward_order(graph, saved, replayed, compiled)
    start = kept
    if replayed and not compiled:
        joint, before, order, start = _copied(graph, kept, replayed, order)
    results = {joint.values[v].storage for v in joint.results}
    begun = [v.storage for v in joint.values if v.origin == "tangent"]
    tangents = {*begun} - {s for at, s in enumerate(begun) if at in lent}
    ended, left = {joint.values[v].storage for v in joint.gradients}, gradients_left(joint)
    if accumulating:
        ended, left = ended - left, set()
    read = joint.held_by_nodes
    forward = live_bytes(joint, before, start=set(), forever=start | results)
    forever = ended | start if stays else ended
    start = start | tangents | (_allocated(graph, saved) & graph.returned & read)
    sums = summed_anew(joint) if anew else {}
    # What runs again is another tensor.
    pinned = {s: joint.ops[at] for s, at in joint.pinned if s not in kept and not compiled}
    options = {"nodes": not compiled, "beside": sums, "pinned": pinned}
    backward = live_bytes(joint, order, start=start, forever=forever, **options)
    inputs = size - sum(joint.storages[s] for s in kept)
    size += sum(joint.storages[s] for s in pinned)
    return Profile(size, forward + inputs, backward + inputs, sum(joint.storages[s] for s in left))


def backward_order(graph: Graph, saved: Set[int], replayed: Set[int], compiled: bool) -> list[Op]:
    """The ops of a region's backward in order, those that run again included."""
    joint, ops = graph.joint, graph.ops
    if not compiled:
        first = _first_reader(joint)
        again = [ops[k] for k in sorted(replayed) if k < len(ops)]
        return [*joint.backward[:first], *again, *joint.backward[first:]]
    there = {o for k in saved if k < len(ops) for o in ops[k].outputs}
    return compiled_order(joint, there, range(len(ops), len(joint.ops)))


def _copied(
    graph: Graph, kept: set[int], replayed: Set[int], order: list[Op]
) -> tuple[Joint, Sequence[Op], list[Op], set[int]]:
    """What an eager engine runs where a region writes in place: the graph with the copies that it makes, the
    ops of its forward, those of its backward, and the storages that it keeps.

    What is kept is copied before the forward writes over it, and what runs again writes over a copy of that.
    What nodes have saved is copied before what runs again writes over it.
    """
    joint, count = graph.joint, len(graph.ops)
    again = [k for k in sorted(replayed) if k < count]
    ran, first = set(again), _first_reader(joint)
    values, storages = list(joint.values), list(joint.storages)

    def other(v: int, size: int) -> int:
        values.append(replace(values[v], storage=len(storages)))
        storages.append(size)
        return len(values) - 1

    # By position: what is copied right before an op, in the forward and when it runs again.
    early, late, start = dict[int, list[Op]](), dict[int, list[Op]](), set(kept)
    for s in kept & joint.writers.keys():
        at = joint.owner[s]
        if later := [k for k in joint.writers[s] if k > at]:
            v = joint.family[s][0]
            own = other(v, storages[s])
            start = start - {s} | {values[own].storage}
            early.setdefault(later[0], []).append(_copy(v, own))
            late.setdefault(at, []).append(_copy(own, v))
    # Each node has a copy of its own.
    saved: dict[tuple[int, int], int] = {}
    for v, packed, node in joint.packed:
        written = joint.writers.get(values[v].storage, ()) if v not in joint.shapes else ()
        if later := [k for k in written if k >= packed and k in ran]:
            saved[v, node] = other(v, values[v].bytes)
            late.setdefault(later[0], []).append(_copy(v, saved[v, node]))
    if not early and not late:
        return joint, graph.ops, order, kept
    ops = [op if op.forward else _reading(op, saved) for op in joint.ops]
    made = replace(joint, values=tuple(values), storages=tuple(storages), ops=tuple(ops))
    forward = [one for k, op in enumerate(graph.ops) for one in (*early.get(k, ()), op)]
    rest = sorted({*again, *late})
    between = [one for k in rest for one in (*late.get(k, ()), *([ops[k]] if k in ran else ()))]
    return made, forward, [*ops[count : count + first], *between, *ops[count + first :]], start


def _copy(of: int, to: int) -> Op:
    return Op(_aten.clone.default, (Ref(of),), {}, (of,), (to,), (), True, "")


def _reading(op: Op, copies: Mapping[tuple[int, int], int]) -> Op:
    """An op of the backward that is given copies of what it reads; nothing has written over these."""
    if copies.keys().isdisjoint((v, op.node) for v in op.reads):
        return op
    given = {ref.id for ref in tree_leaves((op.args, op.kwargs)) if isinstance(ref, Ref)}
    return replace(op, reads=tuple([copies.get((v, op.node), v) for v in op.reads if v in given]))


def _first_reader(joint: Joint) -> int:
    """How many ops of the backward come before the node that first asks for what was saved."""
    saved = {*joint.saved}
    nodes = [op.node for op in joint.backward if saved.intersection(op.reads)]
    return next((at for at, op in enumerate(joint.backward) if op.node in nodes[:1]), 0)


def several_results(joint: Joint) -> bool:
    """Whether a backward may come from some results only, for which what is kept stays until its end."""
    if sum(value.origin == "tangent" for value in joint.values) < 2:
        return False
    made = (joint.values[v] for v in joint.results)
    return len({v.producer for v in made if v.producer >= 0 and v.dtype.is_floating_point}) > 1


def fresh(graph: Graph, saved: Set[int]) -> set[int]:
    """The storages that saved ops allocated, and that the region counts."""
    return _allocated(graph, saved) - graph.free


def _allocated(graph: Graph, saved: Set[int]) -> set[int]:
    joint, ops = graph.joint, graph.ops
    made = ((k, joint.values[o].storage) for k in saved if k < len(ops) for o in ops[k].outputs)
    return {s for k, s in made if joint.owner[s] == k}


def gradients_left(joint: Joint) -> set[int]:
    """The storages of parameters' gradients, which outlive the backward."""
    pairs = zip(joint.gradients, joint.differentiated, strict=True)
    return {joint.values[g].storage for g, v in pairs if joint.values[v].origin == "parameter"}


def summed_anew(joint: Joint) -> dict[int, int]:
    """Bytes of the sum of each parameter's gradient and that of another call, where a new tensor is made.

    That is so for the first sum of gradients that are views, such as a linear layer's: see `written_over`.
    """
    pairs = zip(joint.gradients, joint.differentiated, strict=True)
    mine = [g for g, v in pairs if joint.values[v].origin == "parameter"]
    return {g: joint.values[g].bytes for g in mine if _is_view(joint, joint.values[g].producer)}


def live_bytes(
    joint: Joint,
    ops: Sequence[Op],
    start: set[int],
    forever: set[int],
    *,
    nodes: bool = False,
    beside: Mapping[int, int] | None = None,
    pinned: Mapping[int, Op] | None = None,
) -> int:
    """The most bytes live at once while `ops` run, storages being freed after their last use.

    With `nodes`, what an autograd node reads and makes is freed when the node lets go of it, or ends.
    `beside`: bytes that are made, and others that go, once a value is there. `pinned`: storages that are
    there a second time, until an op has run.
    """
    beside, pinned = beside or {}, pinned or {}
    last: dict[int, int] = {}
    used: dict[int, int] = {}
    ends = node_ends(ops) if nodes else {}
    known = held_until(joint, ops, nodes=nodes)
    for step, op in enumerate(ops):
        for value in (*op.reads, *op.outputs, *op.beside):
            storage = joint.values[value].storage
            used[storage] = step
            late = step if storage in known else ends.get(op.node, step)
            last[storage] = max(last.get(storage, -1), late)
    for storage, step in known.items():
        if storage in last or storage in start:  # of some that are kept a node reads the shape alone
            last[storage] = max(last.get(storage, -1), step)
    ending: dict[int, list[int]] = {}
    for storage, step in last.items():
        if storage not in forever:
            ending.setdefault(step, []).append(storage)
    live = set(start)
    going = {id(op): sum(joint.storages[s] for s, at in pinned.items() if at is op) for op in pinned.values()}
    total = most = sum(joint.storages[s] for s in live) + sum(going.values())
    for step, op in enumerate(ops):
        if nodes and (sum_of := written_over(joint, op)) in live and used[sum_of] == step:
            live.remove(sum_of)
            total -= joint.storages[sum_of]
        # (What runs again takes no states of generators.)
        for value in op.outputs if nodes and op.forward else (*op.beside, *op.outputs):
            storage = joint.values[value].storage
            if storage not in live and joint.owner[storage] >= 0:
                live.add(storage)
                total += joint.storages[storage]
        most = max(most, total + workspace(joint, op), total + sum(beside.get(v, 0) for v in op.outputs))
        total -= going.get(id(op), 0)
        for storage in ending.get(step, ()):
            if storage in live:
                live.remove(storage)
                total -= joint.storages[storage]
    return most


def held_until(joint: Joint, ops: Sequence[Op], *, nodes: bool) -> dict[int, int]:
    """Until which of `ops` locals of Python, or nodes, were seen to hold storages, read or not."""
    if not ops:
        return {}
    if ops[-1].forward:
        return _held_by_locals(joint)
    if not nodes:
        return {}
    places = {id(op): step for step, op in enumerate(ops)}
    return {
        s: len(ops) if at == len(joint.ops) else places[id(joint.ops[at])]
        for s, at in _held_by_nodes(joint).items()
    }


def held_throughout(joint: Joint) -> dict[int, int]:
    """The same for forward and backward of a graph, without a region."""
    found = _held_by_locals(joint)
    for storage, at in _held_by_nodes(joint).items():
        found[storage] = max(found.get(storage, -1), at)
    return found


def _held_by_locals(joint: Joint) -> dict[int, int]:
    return {s: at for s, at in enumerate(joint.held) if at >= 0}


def _held_by_nodes(joint: Joint) -> dict[int, int]:
    # The recording holds the gradients that it begins with, and those that it ends in.
    unknown = {v.storage for v in joint.values if v.origin == "tangent"}
    unknown |= {joint.values[v].storage for v in joint.gradients}
    first = len(joint.forward)
    return {s: at for s, at in enumerate(joint.ends) if at >= first and s not in unknown}


def written_over(joint: Joint, op: Op) -> int:
    """The storage that autograd writes a result to where its tensors are plain ones; -1 if there is none.

    A sum of gradients goes where the sum so far is, and what is scattered goes into the zeros that the same
    node has made. A recording shows new tensors there, as autograd trusts none but plain ones.
    """
    if op.forward or not op.args or not isinstance(op.args[0], Ref):
        return -1
    so_far, out = joint.values[op.args[0].id], joint.values[op.outputs[0]] if op.outputs else None
    maker = so_far.producer
    if out is None or maker < 0 or joint.ops[maker].forward or joint.owner[so_far.storage] < 0:
        return -1
    alike = so_far.shape == out.shape and so_far.dtype == out.dtype
    if not alike or joint.storages[so_far.storage] != out.bytes:
        return -1
    if op.target is _ADD:
        # A view leads to its base, so that autograd holds two handles on the memory: no sum goes there.
        adds = len(op.reads) == 2 and joint.ops[maker].node != op.node and not _is_view(joint, maker)
    else:
        zeros = str(joint.ops[maker].target).partition(".")[2].startswith(_ZEROS)
        adds = op.target in _SCATTERS and zeros and joint.ops[maker].node == op.node
    return so_far.storage if adds else -1


def sums_gradients(joint: Joint, op: Op) -> bool:
    """Whether autograd adds a part of a gradient, which a node has made, to the parts that others have."""
    if op.forward or op.target is not _ADD or len(op.reads) != 2:
        return False
    makers = [joint.values[v].producer for v in op.reads]
    return any(at < 0 or joint.ops[at].node != op.node for at in makers)


def _is_view(joint: Joint, maker: int) -> bool:
    """Whether what an op makes is a view, which leads to its base."""
    op = joint.ops[maker].target if maker >= 0 else None
    return op is not None and traits(op).view and op is not _aten._unsafe_view.default


def node_ends(ops: Sequence[Op]) -> dict[int, int]:
    """The position of the last op of each autograd node."""
    return {op.node: step for step, op in enumerate(ops) if op.node >= 0}


def compiled_order(joint: Joint, there: Set[int], late: Iterable[int]) -> list[Op]:
    """The ops of a compiled backward in order: what runs again does so right before its first reader.

    Args:
        there: the values that need not be made again.
        late: positions of the ops that run in any case.
    """
    done: set[int] = set()
    order: list[Op] = []

    def run(position: int) -> None:
        todo = [position]
        while todo:
            op = joint.ops[todo[-1]]
            makers = {joint.values[v].producer for v in op.reads if v not in there}
            missing = [m for m in makers if m >= 0 and m not in done]
            if missing:
                todo += sorted(missing, reverse=True)
                continue
            if (last := todo.pop()) not in done:
                done.add(last)
                order.append(op)

    for position in sorted(late):
        run(position)
    return order


def step_peak(profiles: Sequence[Profile]) -> int:
    """The most bytes live at once in a forward through all regions and a backward through them in reverse."""
    held = peak = 0
    for region in profiles:
        peak = max(peak, held + region.forward)
        held += region.kept
    made = 0
    for region in reversed(profiles):
        held -= region.kept
        peak = max(peak, held + made + region.backward)
        made += region.gradients
    return peak


def highest_within(limit: int, low: int, high: int, plan: Callable[[int], T], peak: Callable[[T], int]) -> T:
    """The plan of the highest byte budget found whose simulated peak is at most `limit`.

    Peaks need not rise with what is kept: a plan that keeps little may replay much at once. So budgets are
        tried from the top of an even grid down, then by halving between the first that fits and the one
        above.
    A wider limit finds no lower budget: the grid is the same for all, and the halving takes the upper half
    wherever it did under a tighter limit. So what is recomputed never grows with the limit.

    Args:
        limit: bytes.
        low, high: the least and the most bytes worth keeping.
        plan: the plan of a byte budget.
        peak: its simulated peak.

    Raises:
        RematError: no budget fits; the message gives the lowest peak found.
    """
    grid = [low + (high - low) * k // _CELLS for k in range(_CELLS + 1)]
    lowest = None
    for cell in reversed(range(_CELLS + 1)):
        found = plan(grid[cell])
        lowest = peak(found) if lowest is None else min(lowest, peak(found))
        if peak(found) <= limit:
            return found if cell == _CELLS else _halve(limit, grid[cell], grid[cell + 1], found, plan, peak)
    assert lowest is not None
    raise OutOfReach(limit, lowest)


class OutOfReach(RematError):
    """A peak that no choice of what to keep meets; `lowest` is the lowest that was found."""

    def __init__(self, limit: int, lowest: int) -> None:
        self.lowest = lowest
        super().__init__(
            f"A peak of {limit:,} bytes cannot be met by choosing what to keep: the lowest that was found is "
            f"{lowest:,} bytes. Write peak={lowest} or more, make the regions (one block each) or the batch "
            "smaller, or recompute more than once, with remat.fit([stage1, stage2], x, peak=...)."
        )


def _halve(
    limit: int, low: int, high: int, found: T, plan: Callable[[int], T], peak: Callable[[T], int]
) -> T:
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        tried = plan(middle)
        fits = peak(tried) <= limit
        low, high, found = (middle, high, tried) if fits else (low, middle, found)
    return found
