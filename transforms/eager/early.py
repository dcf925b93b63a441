"""A backward pass that a region's function runs itself, before the forward is over: forces, penalties."""

from __future__ import annotations

from typing import Any

import torch

from remat.transforms.compat import graph_task
from remat.transforms.context import active, quiet
from remat.transforms.eager.settle import computed, sources
from remat.transforms.errors import RematError
from remat.transforms.tape import Needs, Program, Recorder

# A `frame` here is a `frame.Frame`, whose file imports this one.


def early_value(frame: Any, at: int, recorder: Recorder) -> torch.Tensor:
    """Saved value `at`: as it still is, or made again from the part of the tape that there is."""
    recorder.leave()
    frame.tape = tape = recorder.tape
    frame.direct = tape.direct()
    number, position = tape.packed[at]
    overwritten = tape.last_write.get(tape.root_of(number), -1) >= position
    living = None if overwritten else recorder.living(number)
    # From now on what is saved is held while the function runs: it costs less than to make it again.
    frame.region.cache.differentiates = True
    task = graph_task()
    if living is None and (task != frame.task or at not in frame.values):
        active.quiet, before = True, active.quiet
        try:
            frame.values = _partly(frame, at, recorder)
        finally:
            active.quiet = before
        frame.task = task
    value = frame.values.pop(at) if living is None else quiet(living.detach)
    recorder.bind(value, number)
    return value


def _partly(frame: Any, at: int, recorder: Recorder) -> dict[int, torch.Tensor]:
    """What was saved so far and may still be asked for."""
    tape = frame.tape
    wanted = [i for i in computed(frame) if i == at or frame.is_held(i)]
    needs = Needs(tape, sources(frame, wanted), recorder.kept)
    if needs.whole:
        raise RematError(
            f"region {frame.region.name!r} runs a backward pass inside, of values that no op has made "
            f"({tape.open or 'a raw kernel fills uninitialized memory'}). Run that part of the function "
            "outside of the region."
        )
    frame.random, frame.snapshots = recorder.random, recorder.snapshots
    outside = recorder.outside
    return frame.execute(
        Program(tape, needs, wanted), lambda i: outside[i].detach(), recorder.kept.__getitem__
    )
