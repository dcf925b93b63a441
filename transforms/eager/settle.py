"""The end of a recorded forward: what a frame keeps, now that it is known what the backward may read."""

from __future__ import annotations

from typing import Any

import torch

from remat.transforms.context import active
from remat.transforms.eager.reports import report_frame
from remat.transforms.eager.rerun import Rerun
from remat.transforms.eager.saved import bytes_of, users, watcher
from remat.transforms.offload import Store, away_in
from remat.transforms.pytree import flatten, split
from remat.transforms.tape import (
    Needs,
    Program,
    Reachability,
    Recorder,
    held_values,
    tensors_in,
)

# A `frame` here is a `frame.Frame`, whose file imports this one.


def settle(frame: Any, recorder: Recorder, out: Any) -> None:
    """Keep what is needed of arguments and values; `out` is what the function returned."""
    tape = frame.tape
    outs = differentiated(out)
    if len(outs) > 1:
        reach = Reachability(outs, frame.start)
        frame.reach = reach if reach.differ else None
    recorder.share_around()
    frame.raw = recorder.raw_writes()
    frame.direct = tape.direct()
    wanted = computed(frame)
    needs = Needs(tape, sources(frame, wanted), recorder.kept)
    held = set(frame.direct.values())
    if needs.whole:
        # The function is to run again: hold all arguments, and what stands in for its ops.
        frame.kept = dict(recorder.kept)
        frame.take(recorder, held.union(needs.outside, range(tape.arguments)))
        frame.residuals = None
        frame.inputs.note_surroundings()
        frame.rerun = Rerun(frame, needs)
    else:
        frame.program = program = Program(tape, needs, wanted)
        frame.kept = {at: value for at, value in recorder.kept.items() if at in program.kept}
        frame.take(recorder, held.union(program.outside))
        _prefer_residuals(frame, recorder)
    if active.listeners:
        report_frame(frame, recorder)


def computed(frame: Any) -> list[int]:
    """The saved values that have to be made again: those from outside are held."""
    return [i for i in range(len(frame.tape.packed)) if i not in frame.direct]


def sources(frame: Any, wanted: list[int]) -> set[int]:
    """The ops whose results these saved values are."""
    tape = frame.tape
    return {source for i in wanted for source in tape.sources(*tape.packed[i])}


def differentiated(out: Any) -> list[torch.Tensor]:
    """The results with a history."""
    return [t for t in split(flatten(out)[0])[0] if t.grad_fn is not None]


def _prefer_residuals(frame: Any, recorder: Recorder) -> None:
    # Promise 2: never keep more than no remat keeps. Where the inputs are larger than what autograd saves
    # (a reduction, a cast down), the saved values themselves are the better thing to keep.
    residuals, program = frame.residuals, frame.program
    frame.residuals = None
    if residuals is None or program is None or not any(step.call for step in program.steps):
        return
    needed = [recorder.outside[at] for at in frame.held]
    if residuals.bytes < bytes_of([*needed, *tensors_in(list(frame.kept.values()))]):
        frame.residuals = residuals
        frame.hold_residuals(residuals)
        frame.held, frame.kept, frame.dropped, frame.random = {}, {}, {}, {}


def hold_kept(frame: Any, recorder: Recorder, out: Any) -> None:
    """Hold what is kept until the backward, by the user's hooks where there are some."""
    kept, hooks = frame.kept, users(frame.inputs.hooks)
    if kept:
        results = list(tensors_in(flatten(out)[0]))
        frame.kept = held_values(kept, frame.region.name, results, hooks)
        _note_away(frame, recorder, results)
    if recorder.parent is not None or frame.inputs.hooks is not None:
        # A region around copies what is about to be overwritten.
        _tell_around(frame, recorder, kept if hooks is None else frame.kept)


def _tell_around(frame: Any, recorder: Recorder, kept: dict[int, Any]) -> None:
    """What a region keeps is not computed again by a region around it, and what it reads is not lost."""
    if (tell := watcher(frame.inputs.hooks)) is not None:
        for at in frame.held:
            tell(recorder.outside[at])
    recorder.offer_around(kept)


def _note_away(frame: Any, recorder: Recorder, results: list[torch.Tensor]) -> None:
    """Note what was sent to the host."""
    away = {at: value for at, value in frame.kept.items() if any(True for _ in away_in(value))}
    if not away:
        return
    frame.store = Store(frame.kept)
    # The caller may write to the results, into memory that is perhaps still being sent.
    numbers = [recorder.bound(t) for t in results]
    roots = {None if number is None else frame.tape.root_of(number) for number in numbers}
    for at, value in away.items():
        # An alias that autograd made of something may be of anything.
        if None in roots or frame.tape.nodes[at].root in roots:
            for parcel in away_in(value):
                parcel.parcel.wait()
