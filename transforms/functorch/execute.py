"""Running a primitive below every level: the recorded forward, and its recomputation in a pull-back."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from remat.transforms.compat import next_node, unwrapped
from remat.transforms.context import active
from remat.transforms.functorch.primitive import Prim, Residuals, Tensors
from remat.transforms.functorch.pullback import replaying
from remat.transforms.state import RandomState
from remat.transforms.tape import (
    Ends,
    Kept,
    Replay,
    Trace,
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
    trace = Trace(region.name)
    trace.loose = prim.dual
    selector = region.selector() if region.selector else None
    record = region.record(trace, selector, operands)
    random = RandomState(operands) if region.preserve_rng_state else None
    outside: set[int] = set()
    packed: list[tuple[int, int]] = []
    ends: list[Ends] = []
    unseen: list[bool] = []
    start = next_node()

    def watch(tensor: torch.Tensor) -> None:
        bottom = unwrapped(tensor)
        found = record.find(bottom)
        if record.origin(bottom) is None:
            outside.add(storage(bottom))
        if found is not None:
            packed.extend((source, next_node() - 1) for source in record.sources(found))

    def note(outs: Tensors) -> None:
        unseen.append(holds_unseen(outs, start))
        if len(outs) > 1:
            ends.append(Ends(outs, start))

    family.watch, family.made = watch, note
    try:
        with selector.watching(levels=True) if selector else contextlib.nullcontext(), record:
            outs = (prim.recorded or prim.body)(*operands)
    finally:
        watched = family.watch is not None and not any(unseen)
        family.watch, family.made = None, None
    trace.settle({made for made, _ in packed} if watched else None)
    trace.finish(record, [unwrapped(t) for t in outs])
    if watched:
        trace.also_reads(outside)
    for sink in prim.sinks:
        sink.trace, sink.random, sink.outside = trace, random, outside if watched else None
        # Of several levels that differentiate, each has its own graph: then all is needed.
        if watched and len(ends) == 1 and ends[0].differ:
            sink.ends, sink.packed = ends[0], packed
    if selector:
        selector.finished(trace)
    if active.listeners:
        _report(region.name, trace, prim.sinks[-1], operands)
    return outs


def _report(name: str, trace: Trace, sink: Residuals, operands: Tensors) -> None:
    for i, tensor in enumerate(operands):
        if sink.needs(tensor):
            report(Kept("argument", tensor, name, i))
    for at, node in enumerate(trace.nodes):
        for tensor, away in held_tensors(node.kept):
            report(Kept("policy", tensor, name, at, node.op, node.name, away))


def execute_pull(prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run a region again as it ran in its forward, and pull its cotangents back."""
    family, source = prim.family, prim.source
    with contextlib.ExitStack() as stack:
        stack.enter_context(_filled(operands))
        if family.ambient.must_be_restored():
            stack.enter_context(family.ambient.restored())
        if source is not None and source.random is not None:
            stack.callback(source.random.again().restore)
            source.random.restore()
        if source is not None and source.trace is not None and source.trace.generators:
            stack.enter_context(source.trace.generators_rewound())
        replay = None
        if source is not None and source.trace is not None:
            source.trace.check_unwritten(family.region.function)
        if source is not None and source.trace is not None and not source.trace.loose:
            check = family.region.determinism_check != "none"
            part = source.part(prim.present)
            digest = family.region.digest
            stack.enter_context(source.trace.fetched(part))
            replay = Replay(source.trace, early_stop=False, check=check, digest=digest, part=part)
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
