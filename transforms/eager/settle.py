"""The end of a recorded forward: what a frame keeps, now that it is known what the backward may read; and a
backward pass that the function runs itself, before the forward is over: forces, penalties."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from remat.transforms.compat import graph_task
from remat.transforms.context import active, untracked
from remat.transforms.eager.rerun import Rerun
from remat.transforms.eager.residuals import Residuals, bytes_of
from remat.transforms.eager.saved import tables, users
from remat.transforms.errors import RematError
from remat.transforms.offload import held_tensors
from remat.transforms.ops import tensors_in
from remat.transforms.pytree import flatten, split
from remat.transforms.sharded import local_tensors, placements_of
from remat.transforms.state import Fingerprint, fingerprints_of, held_states
from remat.transforms.tape import (
    Held,
    Kept,
    Program,
    Reachability,
    RecomputeSteps,
    Recorder,
    held_values,
    may_be_absent,
    read_for_shape,
    report,
    sent_away,
)

if TYPE_CHECKING:
    from remat.transforms.eager.frame import Frame


def settle(frame: Frame, recorder: Recorder, out: Any) -> None:
    """Keep what is needed of arguments and values; `out` is what the function returned."""
    tape = frame.tape
    outs = frame.differentiated(out)
    if len(outs) > 1:
        reach = Reachability(outs, frame.start)
        frame.reach = reach if reach.differ else None
    note_tables(frame, recorder)
    recorder.share_around()
    recorder.tell_saved()
    frame.freed = recorder.freed()
    frame.raw = recorder.raw_writes()
    # What nothing has read of memory that a tensor had before is let go of.
    frame.replaced = tuple([r if r.met else r._replace(before=None) for r in recorder.replaced])
    wanted, needs = _needed(frame, recorder, outs)
    if needs.must_rerun and frame.late:
        frame.hold_late()  # a second run of the function is told of no more than the first
        wanted, needs = _needed(frame, recorder, outs)
    held = {at for i, at in frame.direct.items() if i not in frame.dead and i not in frame.hollow}
    if (needs.must_rerun or frame.whole) and frame.hold_whole():
        frame.residuals = None
    elif needs.must_rerun:
        # The function is to run again: hold all arguments, and what stands for ops that can be told again.
        if tape.loose:
            needs = RecomputeSteps(tape, range(len(tape.nodes)), {})
        else:
            frame.kept = dict(sorted(recorder.kept.items()))
        # What it writes to is found again as it was, whether or not an op that is needed reads that.
        written = [
            at for at, o in enumerate(tape.outside) if o.root in recorder.snapshots or o.root in frame.freed
        ]
        frame.take(recorder, held.union(needs.outside, range(tape.arguments), written))
        frame.residuals = None
        frame.inputs.note_surroundings()
        frame.rerun = Rerun(needs, may_be_absent(recorder, ()), _prints(frame, recorder, out))
    else:
        frame.program = program = Program(tape, needs, wanted)
        frame.kept = {at: recorder.kept[at] for at in program.kept}
        held.update(program.outside)
        # What is not held after all is no business of hooks.
        if (residuals := _smaller_residuals(frame, program, recorder, held)) is not None:
            frame.kept = {}
            frame.hold_residuals(residuals)
        else:
            frame.residuals = None
            frame.take(recorder, held)
    if active.listeners:
        report_frame(frame, recorder)


def _needed(frame: Frame, recorder: Recorder, outs: list[torch.Tensor]) -> tuple[list[int], RecomputeSteps]:
    tape = frame.tape
    frame.dead = frozenset([i for i in range(len(tape.saved_values)) if not frame.is_held(i)])
    frame.hollow = read_for_shape(tape, outs, frame.start) - frame.dead
    frame.direct = steady(tape.direct(), recorder)
    wanted = computed(frame)
    return wanted, RecomputeSteps(tape, tape.sources_of(wanted), recorder.kept)


def note_tables(frame: Frame, recorder: Recorder) -> None:
    """Note, under hooks of the user's, what this call has made of nothing that it was given."""
    if users(frame.inputs.hooks) is None:
        return
    are = _tables(recorder)
    for tensor, number in recorder.living_values():
        if number >= 0 and are[recorder.tape.makers[number]]:
            tables[tensor] = None


def _tables(recorder: Recorder) -> list[bool]:
    """Of every op, whether it computes the same whatever a region is given."""
    given, found = [tensor in tables for tensor in recorder.outside], list[bool]()
    for node in recorder.tape.nodes:
        of_tables = all([given[i] for i in node.external]) and all([found[i] for i in node.deps])
        found.append(of_tables and not node.draws)
    return found


def _prints(frame: Frame, recorder: Recorder, out: Any) -> list[Fingerprint] | None:
    """What a second run is compared by where its ops are not; None where it may return other numbers."""
    unlike = bool(frame.tape.loose or frame.replaced or frame.freed)
    compared = unlike and frame.region.compares_results(bool(recorder.random))
    return fingerprints_of(flatten(out)[0]) if compared else None


def broken_off(frame: Frame, recorder: Recorder, error: BaseException) -> None:
    """An exception ends the forward: settle what ran until then, for values may leave with the exception, or
    lie in a module."""
    frame.tape, settled = recorder.tape, False
    try:
        # The user's exception goes on. Should a value be asked for after all, that raises.
        with contextlib.suppress(Exception):
            if isinstance(error, Exception) and not recorder.refused:
                recorder.start_recording()
                frame.tape = recorder.tape
                settle(frame, recorder, None)
                hold_kept(frame, recorder, None)
                settled = True
    finally:
        frame.recorder = None
        if not settled:
            drop(frame)


def drop(frame: Frame) -> None:
    """Hold nothing, as the forward was broken off: what is not settled leads back to the frame through the
    graph, and nothing would free it."""
    frame.recorder = frame.late = frame.residuals = frame.program = frame.rerun = frame.store = None
    frame.kept, frame.held, frame.spare, frame.random, frame.snapshots = {}, {}, {}, {}, {}
    frame.direct, frame.raw, frame.replaced, frame.freed = {}, [], (), {}


def steady(direct: dict[int, int], recorder: Recorder) -> dict[int, int]:
    """Those of the saved values from outside that have the memory that they had when they were saved."""
    if not recorder.replaced:
        return direct
    other = {id(known.tensor) for known in recorder.replaced}
    return {i: at for i, at in direct.items() if id(recorder.outside[at]) not in other}


def computed(frame: Frame) -> list[int]:
    """The saved values that have to be made again: not those from outside, nor what nobody reads."""
    others = frame.direct.keys() | frame.dead | frame.hollow
    return [i for i in range(len(frame.tape.saved_values)) if i not in others]


def _smaller_residuals(
    frame: Frame, program: Program, recorder: Recorder, held: set[int]
) -> Residuals | None:
    """All that autograd saves, where that is smaller than what would be held in its place.

    Promise 2: never keep more than no remat keeps. Where the inputs are larger than what autograd saves (a
    reduction, a cast down), the saved values themselves are the better thing to keep.
    """
    residuals = frame.residuals
    if residuals is None or not any(step.call for step in program.steps):
        return None
    # What lies in memory that the region writes to is another value by the next call.
    tape = frame.tape
    if recorder.snapshots and any(
        tape.root_of(number) in recorder.snapshots for number, _ in tape.saved_values
    ):
        return None
    needed = [tensor for at in held if (tensor := recorder.outside[at]) not in tables]
    residuals.leave(frame.hollow)
    smaller = residuals.count() < bytes_of([*needed, *tensors_in(list(frame.kept.values()))])
    return residuals if smaller else None


def hold_kept(frame: Frame, recorder: Recorder, out: Any) -> None:
    """Hold what is kept until the backward, by the user's hooks where there are some.

    Hooks see it after what is held from outside, each in the order of the tape: torch's checkpoint takes what
    a second run packs by its order, so nothing is packed before all is decided.
    """
    kept, hooks = frame.kept, users(frame.inputs.hooks)
    if kept:
        results = split(flatten(out)[0])[0]
        for tensor in results:
            recorder.meet(tensor)
        results = list(local_tensors(results))
        # And what the function has left elsewhere.
        results.extend(recorder.shared(kept))
        around = [recorder.around(tensor) for tensor in results]
        pairs = list(zip(results, around, strict=True))
        # Tables that a later call finds stored are held beside hooks there, so here, too.
        made = [] if hooks is None else _tables(recorder)
        held = held_values(
            {at: kept[at] for at, table in enumerate(made) if table and at in kept}, frame.region.name, pairs
        )
        held |= held_values({at: kept[at] for at in kept if at not in held}, frame.region.name, pairs, hooks)
        frame.kept = {at: held[at] for at in kept}
        frame.store = sent_away(frame.kept, recorder, results)
        if hooks is not None:
            _tell_numbers(frame.kept, recorder)
    if recorder.parent is not None or frame.inputs.hooks is not None:
        # A region around copies what is about to be overwritten.
        recorder.offer_around(kept if hooks is None else frame.kept)


def _tell_numbers(kept: dict[int, Any], recorder: Recorder) -> None:
    """Say under which numbers the recordings around know what is kept, which hooks may give back early."""
    for at, value in kept.items():
        mode: Any = recorder
        while at in mode.op_in_parent and mode.parent.records:
            at, mode = mode.op_in_parent[at], mode.parent
            for number, held in enumerate(flatten(value)[0], mode.tape.nodes[at].first):
                if isinstance(held, Held):
                    held.known = (*held.known, (weakref.ref(mode), number))


# -- reports, and early backwards ----------------------------------------------------------------------


def report_frame(frame: Frame, recorder: Recorder) -> None:
    """Report every tensor that a frame holds until its backward, and why."""
    name, tape, nodes = frame.region.name, frame.tape, frame.tape.nodes
    for at, held in frame.held.items():
        # What an enclosing region is to recompute stays alive no longer than that takes.
        if not held.enclosed:
            why = "argument" if at < tape.arguments else "captured"
            lies = placements_of(recorder.around(recorder.outside[at]))
            report(Kept(why, recorder.outside[at], name, at, placements=lies))
    for at, value in frame.kept.items():
        # A view is the memory of the op that made it.
        node, root = nodes[at], nodes[at].root
        maker = nodes[root] if root >= 0 else node
        for tensor, away in held_tensors(value):
            why = "decision" if at in tape.decided else "policy"
            lies = recorder.lies.get(node.first)
            report(Kept(why, tensor, name, at, maker.op, node.name or maker.name, away, lies))
    for i, ref in enumerate(frame.handles):
        handle = None if ref is None else ref()
        if handle is None or handle.value is None:
            continue
        number, _ = tape.saved_values[i]
        root = tape.root_of(number)
        node = nodes[root] if root >= 0 else None
        made = nodes[tape.makers[number]] if number >= 0 else None
        saved = made is not None and node is not None and (made.verdict or node.verdict)
        why = "captured" if node is None else "policy" if saved else "residual"
        place = tape.makers[number] if number >= 0 else i
        report(Kept(why, handle.value.get(), name, place, node and node.op, node and node.name))
    for snapshot in frame.snapshots.values():
        for tensor in snapshot.tensors():
            report(Kept("captured", tensor, name, -1))
    for tensor in untracked(held_states, frame.random.values()):
        report(Kept("random", tensor, name, -1))


def early_value(frame: Frame, at: int, recorder: Recorder) -> torch.Tensor:
    """Saved value `at`: as it still is, or made again from the part of the tape that there is."""
    recorder.start_recording()
    recorder.tell_saved()
    frame.tape = tape = recorder.tape
    frame.direct = steady(tape.direct(), recorder)
    number, position = tape.saved_values[at]
    overwritten = tape.last_write.get(tape.root_of(number), -1) >= position
    overwritten = overwritten or (number < 0 and at not in frame.direct)
    living: torch.Tensor | None = None
    if not overwritten and number < 0:
        living = recorder.outside[-1 - number]
    elif not overwritten and frame.early is not None and (handle := frame.handles[at]) is not None:
        living = frame.early.get(handle())
    # From now on what is saved is held while the function runs: it costs less than to make it again.
    frame.region.cache.differentiates = True
    task = graph_task()
    if living is None and (task != frame.task or at not in frame.values):
        active.untracked, before = True, active.untracked
        try:
            frame.values = _partly(frame, at, recorder)
        finally:
            active.untracked = before
        frame.task = task
    value = frame.values.pop(at) if living is None else untracked(living.detach)
    (recorder.bind if overwritten else recorder.bind_around)(value, number)
    return value


def _partly(frame: Frame, at: int, recorder: Recorder) -> dict[int, torch.Tensor]:
    """What was saved so far and may still be asked for."""
    tape = frame.tape
    held = {handle.at for handle in frame.early or ()}
    wanted = [i for i in computed(frame) if i == at or (frame.is_held(i) and i not in held)]
    needs = RecomputeSteps(tape, tape.sources_of(wanted), recorder.kept, so_far=True)
    if needs.must_rerun:
        raise RematError(
            f"region {frame.region.name!r} runs a backward pass inside, of values that no op has made "
            f"({tape.rerun_reason or 'a raw kernel fills uninitialized memory'}). Run that part of the "
            "function outside of the region."
        )
    frame.random, frame.snapshots = recorder.random, recorder.snapshots
    program = Program(tape, needs, wanted)
    there = {at: recorder.outside[at].detach() for at in program.outside}
    return frame.execute(program, there, recorder.kept.__getitem__)
