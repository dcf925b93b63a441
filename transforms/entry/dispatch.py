"""Where it is decided which of the two ways of recomputing a region takes."""

from __future__ import annotations

import threading
from typing import Any

import torch

from remat.transforms.closure import (
    MOST_TRIES,
    Bindings,
    Missed,
    Swap,
    as_operand,
    changing,
    kept_whole,
    made_inside,
    not_compiled,
)
from remat.transforms.closure import captured as convert_captured
from remat.transforms.compat import (
    VMAP,
    hooks_allowed,
    hooks_disabled,
    in_transform,
    is_hook_refusal,
    is_tracing,
    levels,
    memory_is_real,
    modes_active,
    pop_hooks,
    profiling,
    push_hooks,
    unwrapped,
)
from remat.transforms.compiled import Written
from remat.transforms.context import enclosing, inside
from remat.transforms.eager import (
    Following,
    Inputs,
    Plain,
    Traced,
    enclosed,
    may_keep_around,
    stop_enclosing,
    unread,
    watcher,
)
from remat.transforms.functorch import Family, Look, Prim, call, leaving, looks, seen
from remat.transforms.intermediates import Mirrors, current
from remat.transforms.pytree import check_results, flatten, merge, split, unflatten
from remat.transforms.region import Plan, Region, labelled, planning
from remat.transforms.state import Ambient, RandomState, device_kinds
from remat.transforms.tape import listening


class _Keeping(threading.local):
    everything = False


_keeping = _Keeping()


def outermost() -> bool:
    """Whether no other region is being recorded or recomputed around here."""
    return enclosing() is None and not enclosed()


def run_transparently(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` and keep what autograd keeps, regions inside it included."""
    before = _keeping.everything
    _keeping.everything = True
    try:
        return function(*args, **kwargs)
    finally:
        _keeping.everything = before


def keeping_everything() -> bool:
    """Whether `run_transparently` is at work around here."""
    return _keeping.everything


def run(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `region`: by a frame in plain autograd, by the primitive under functorch levels."""
    if _keeping.everything:
        return region.function(*args, **kwargs)
    if in_transform():
        return _run_batched(region, args, kwargs) if _only_batched() else _run_primitive(region, args, kwargs)
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return region.function(*args, **kwargs)
    if region.memory.uses_func or hooks_disabled() is not None:
        return _run_primitive(region, args, kwargs)
    if modes_active() and is_tracing():
        # AOTAutograd without Dynamo calls no hooks.
        return _run_primitive(region, args, kwargs)
    try:
        return _run_frame(region, args, kwargs)
    except RuntimeError as error:
        if not is_hook_refusal(error):
            raise
    region.memory.uses_func = True
    return _run_primitive(region, args, kwargs)


def _run_batched(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Under `vmap` alone: where nothing is differentiated the function runs as it is.

    torch.cond, which compiles itself, refuses the primitive's modes.
    """
    if not torch.is_grad_enabled():
        return region.function(*args, **kwargs)
    tensors, _ = split(flatten((args, kwargs))[0])
    if current() or any(_graded(t) for t in (*tensors, *convert_captured(region.function))):
        return _run_primitive(region, args, kwargs)
    random = RandomState(tensors)
    out = region.function(*args, **kwargs)
    if not any(_graded(t) for t in split(flatten(out)[0])[0]):
        return out
    # Something that the function reads, and that the search has not found, is differentiated.
    random.restore()
    return _run_primitive(region, args, kwargs)


def _graded(tensor: torch.Tensor) -> bool:
    return unwrapped(tensor).requires_grad


def _only_batched() -> bool:
    """Whether `vmap` is all that torch.func does around here."""
    return all(kind == VMAP for _, kind, _ in levels())


def _run_frame(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs = Inputs(region, args, kwargs)
    # Offsets add ops to those that earlier calls ran.
    key = None if region.key is None or inputs.taps else inputs.signature()
    plan = None if key is None else _known(inputs, key)
    if plan is None:
        frame = Traced(inputs, learns=key is not None and key not in region.lessons.hopeless)
    else:
        frame = Plain(inputs, plan) if plan.program is None else Following(inputs, plan)
    if enclosing() or profiling():
        with labelled("forward", region.name), inside():
            out = frame.forward(args, kwargs)
    else:
        out = frame.forward(args, kwargs)
    if isinstance(frame, Traced) and key is not None:
        region.lessons.remember(key, frame.lesson(), final=frame.learns)
    elif isinstance(frame, Following) and frame.lost:
        region.lessons.plans.pop(key, None)
    inputs.tensors = []
    if inputs.hooks is not None:
        stop_enclosing(inputs)
    return out


def _known(inputs: Inputs, key: Any) -> Plan | None:
    """What an earlier trace taught, if it holds here."""
    plan = inputs.region.lessons.plans.get(key)
    if plan is None or plan.near != len(inputs.bindings.near):
        return None
    if inputs.region.determinism_check == "exact" or listening():
        return None
    if inputs.hooks is None and not modes_active():
        # Then there is no region around either.
        return plan
    if watcher(inputs.hooks) or may_keep_around() or not memory_is_real():
        return None
    return plan if plan.program is None or (inputs.hooks is None and enclosing() is None) else None


def _run_primitive(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = flatten((args, kwargs))
    tensors, at = split(leaves)
    taps = Mirrors(lambda: _dry_run(region, args, kwargs, tensors)) if current() else None
    found = [*convert_captured(region.function), *(taps.offsets if taps else ())]
    random = RandomState(tensors)
    for _ in range(MOST_TRIES):
        try:
            return _Flat(region, leaves, spec, at, tensors, found, taps)()
        except Missed as missed:
            if any(t is missed.tensor for t in (*tensors, *found)):
                raise
            found.append(missed.tensor)
        except _Again:
            pass
        except Exception as error:
            if not not_compiled(error):
                raise
        # What the broken-off run drew is drawn again.
        random.restore()
    raise changing(region.name)


def _dry_run(region: Region, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
    random = RandomState(tensors)
    try:
        with torch.no_grad(), planning(region.name):
            run_transparently(region.function, args, kwargs)
    finally:
        random.restore()


class _Flat:
    """A region's call with every tensor it depends on as a flat operand."""

    def __init__(
        self, region: Region, leaves: Any, spec: Any, at: Any, tensors: Any, captured: Any, taps: Any
    ) -> None:
        self.region, self.leaves, self.spec, self.at, self.taps = region, leaves, spec, at, taps
        self.count = len(tensors)
        self.captured = captured
        self.operands = [as_operand(t) for t in (*tensors, *captured)]
        self.bindings = Bindings(region.function, region.slots)
        world = Written(region) if is_tracing() else None
        self.family = Family(region, Ambient(device_kinds(self.operands)), world)
        self.out_leaves: list[Any] = []
        self.out_at: list[int] = []
        self.out_spec: Any = None
        self.looks: list[Look | None] | None = None  # once the function has run

    def __call__(self) -> Any:
        with labelled("forward", self.region.name):
            outs = call(Prim(self.body, self.family), self.operands)
        made_inside(outs)
        outs = list(outs) if self.looks is None else seen(outs, self.looks)
        out, named = unflatten(merge(self.out_leaves, self.out_at, outs), self.out_spec)
        if self.taps is not None:
            self.taps.pass_on(named)
        return out

    def body(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.family.ambient.casts:
            # Autocast caches casts of leaves; below the levels every operand would be one, above them none.
            operands = tuple([t.view_as(t) for t in operands])
        own, captured = operands[: self.count], operands[self.count :]
        args, kwargs = unflatten(merge(self.leaves, self.at, list(own)), self.spec)
        table = {id(t): operand for t, operand in zip(self.captured, captured, strict=True)}
        with self.bindings.restored(), Swap(table, own), kept_whole():
            out, named = self._tapped(args, kwargs, table) if self.taps else (self._watched(args, kwargs), ())
        check_results(out, self.region.name)
        self.out_leaves, self.out_spec = flatten((out, named))
        tensors, self.out_at = split(self.out_leaves)
        self.out_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in self.out_leaves]
        # A captured tensor may be returned as it is, without any torch call that would have met it.
        tensors = [table.get(id(t), t) for t in tensors]
        if self.looks is None:
            self.looks = looks(tensors)
        return leaving(tensors, self.looks)

    def _tapped(self, args: Any, kwargs: Any, table: dict[int, torch.Tensor]) -> tuple[Any, Any]:
        # Named values leave as results like any other: every run of the body has the same ones.
        context, mirrors = self.taps.opened(table)
        with context:
            out = self._watched(args, kwargs)
        return out, self.taps.found(mirrors)

    def _watched(self, args: Any, kwargs: Any) -> Any:
        watch = self.family.watch
        if watch is None or self.region.memory.uses_func:
            self.family.watch = None
            return self.region.run(args, kwargs)
        with hooks_allowed():
            push_hooks(watch, unread)
            try:
                return self.region.run(args, kwargs)
            except RuntimeError as error:
                if not is_hook_refusal(error):
                    raise
            finally:
                pop_hooks()
        # The function uses torch.func itself; what the backward reads stays unknown, so all of it runs again.
        self.region.memory.uses_func = True
        raise _Again


class _Again(BaseException):
    """The forward must be run afresh, without watching."""
