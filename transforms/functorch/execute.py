"""Running a primitive below every level: the recorded forward, and its recomputation in a pull-back."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from remat.transforms.compat import next_node, unwrapped
from remat.transforms.context import active
from remat.transforms.functorch.primitive import Prim, Residuals, Tensors
from remat.transforms.functorch.pullback import replaying
from remat.transforms.functorch.recorded import Recorded
from remat.transforms.state import RandomState
from remat.transforms.tape import (
    ExposureWatch,
    Kept,
    Reachability,
    Recorder,
    Tape,
    held_tensors,
    holds_unseen,
    report,
    storage,
)


def execute(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run a region's function; recorded, where a node above it will pull back."""
    return _execute_recorded(prim, operands) if prim.sinks else prim.body(*operands)


def _execute_recorded(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    region, family = prim.family.region, prim.family
    tape = Tape(region.name)
    tape.loose = prim.dual
    recorder = Recorder(tape, region.selector, operands, digest=region.digest, reruns=True)
    random = RandomState(operands) if region.preserve_rng_state else None
    saved: set[int] = set()
    packed: list[tuple[int, int]] = []
    reaches: list[Reachability] = []
    unseen: list[bool] = []
    start = next_node()

    def watch(tensor: torch.Tensor) -> None:
        bottom = unwrapped(tensor)
        number = recorder.number(bottom)
        if number < 0 or tape.root_of(number) < 0:
            saved.add(storage(bottom))
        owner = next_node() - 1 - start
        packed.extend((source, owner) for source in tape.sources(number, len(tape.nodes)))

    def note(outs: Tensors) -> None:
        unseen.append(holds_unseen(outs, start))
        if len(outs) > 1:
            reaches.append(Reachability(outs, start))

    family.watch, family.made = watch, note
    selector = recorder.selector
    try:
        watching = selector.watching(levels=True) if selector else contextlib.nullcontext()
        with watching, ExposureWatch(recorder), recorder:
            outs = (prim.recorded or prim.body)(*operands)
    finally:
        watched = family.watch is not None and not any(unseen)
        family.watch, family.made = None, None
    recorded = Recorded(
        region, recorder, packed if watched else None, saved, [unwrapped(t) for t in outs], random
    )
    # Of several levels that differentiate, each has its own graph: then all is needed.
    if watched and len(reaches) == 1 and reaches[0].differ:
        recorded.reach = reaches[0]
    for sink in prim.sinks:
        sink.recorded = recorded
    if selector:
        selector.finished(tape)
    if active.listeners:
        _report(recorded, prim.sinks[-1], operands)
    return outs


def _report(recorded: Recorded, sink: Residuals, operands: Tensors) -> None:
    name = recorded.region.name
    for i, tensor in enumerate(operands):
        if sink.needs(tensor):
            report(Kept("argument", tensor, name, i))
    for at, value in recorded.kept.items():
        node = recorded.tape.nodes[at]
        for tensor, away in held_tensors(value):
            report(Kept("policy", tensor, name, at, node.op, node.name, away))


def execute_pull(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run a region again as it ran in its forward, and pull its cotangents back."""
    family, source = prim.family, prim.source
    recorded = None if source is None else source.recorded
    with contextlib.ExitStack() as stack:
        stack.enter_context(_filled(operands))
        if family.ambient.must_be_restored():
            stack.enter_context(family.ambient.restored())
        replay = None
        if recorded is not None:
            recorded.check_unwritten()
            needs = recorded.part(prim.present)
            stack.enter_context(recorded.surroundings(needs))
            replay = recorded.replay(needs)
        stack.enter_context(replaying(replay, family.region.name))
        return tuple(prim.body(*operands))


@contextlib.contextmanager
def _filled(operands: Tensors) -> Any:
    """Give hollow operands memory (of any content) for as long as the function runs: it may look, it must
    not crash."""
    hollow = [t for t in operands if t.numel() and _storage_bytes(t) == 0]
    for tensor in hollow:
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        tensor.untyped_storage().resize_((last + 1) * tensor.element_size())
    try:
        yield
    finally:
        for tensor in hollow:
            tensor.untyped_storage().resize_(0)


def _storage_bytes(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 1
