"""Where it is decided which of the two ways of recomputing a region takes."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from remat.transforms import _capture, _frame, _torch, _trace, _tree
from remat.transforms._errors import RematError
from remat.transforms._primitive import Family, Prim, call
from remat.transforms._region import Region
from remat.transforms._state import Ambient, device_kinds

_MOST_TRIES = 50
# Functions that were seen to use torch.func inside: they cannot run under saved-tensor hooks.
_uses_func: weakref.WeakSet[Any] = weakref.WeakSet()


_keeping = threading.local()


def outermost() -> bool:
    """Whether no other region is being recorded or recomputed around here."""
    return _trace.enclosing() is None and not _frame.enclosed()


def run_transparently(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` and keep what autograd keeps, regions inside it included."""
    before = getattr(_keeping, "everything", False)
    _keeping.everything = True
    try:
        return function(*args, **kwargs)
    finally:
        _keeping.everything = before


def keeping_everything() -> bool:
    """Whether `run_transparently` is at work around here."""
    return getattr(_keeping, "everything", False)


def run(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `region`: through saved-tensor hooks in plain autograd, through the primitive under functorch "
    "levels."""
    if keeping_everything():
        return region.function(*args, **kwargs)
    if _torch.in_transform():
        return _run_primitive(region, args, kwargs)
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return region.function(*args, **kwargs)
    if region.anchor in _uses_func or _torch.hooks_disabled() is not None:
        return _run_primitive(region, args, kwargs)
    try:
        return _frame.call(region, args, kwargs)
    except RuntimeError as error:
        if not _torch.is_hook_refusal(error):
            raise
    _uses_func.add(region.anchor)
    return _run_primitive(region, args, kwargs)


def _run_primitive(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = _tree.flatten((args, kwargs))
    tensors, at = _tree.split(leaves)
    found = _capture.captured(region.function)
    for _ in range(_MOST_TRIES):
        try:
            return _Flat(region, leaves, spec, at, tensors, found)()
        except _capture.Missed as missed:
            if any(t is missed.tensor for t in (*tensors, *found)):
                raise
            found.append(missed.tensor)
        except _Again:
            continue
    raise RematError(
        f"region {region.name!r} reads tensors that carry derivatives and that change from run to run, so "
        "they cannot be made "
        "operands. Pass them as arguments."
    )


class _Flat:
    """A region's call with every tensor it depends on as a flat operand."""

    def __init__(self, region: Region, leaves: Any, spec: Any, at: Any, tensors: Any, captured: Any) -> None:
        self.region, self.leaves, self.spec, self.at = region, leaves, spec, at
        self.count = len(tensors)
        self.captured = captured
        self.operands = [_capture.as_operand(t) for t in (*tensors, *captured)]
        self.bindings = _capture.Bindings(region.function)
        self.family = Family(region, Ambient(device_kinds(self.operands)))
        self.out_leaves: list[Any] = []
        self.out_at: list[int] = []
        self.out_spec: Any = None

    def __call__(self) -> Any:
        outs = call(Prim(self.body, self.family), self.operands)
        _capture.made_inside(outs)
        return _tree.unflatten(_tree.merge(self.out_leaves, self.out_at, list(outs)), self.out_spec)

    def body(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.family.ambient.casts:
            # Autocast caches casts of leaves; below the levels every operand would be one, above them none.
            operands = tuple([t.view_as(t) for t in operands])
        own, captured = operands[: self.count], operands[self.count :]
        args, kwargs = _tree.unflatten(_tree.merge(self.leaves, self.at, list(own)), self.spec)
        table = {id(t): operand for t, operand in zip(self.captured, captured, strict=True)}
        with self.bindings.restored(), _capture.Swap(table, own):
            out = self._watched(args, kwargs)
        _tree.check_results(out, self.region.name)
        self.out_leaves, self.out_spec = _tree.flatten(out)
        tensors, self.out_at = _tree.split(self.out_leaves)
        self.out_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in self.out_leaves]
        # A captured tensor may be returned as it is, without any torch call that would have met it.
        return tuple([table.get(id(t), t) for t in tensors])

    def _watched(self, args: Any, kwargs: Any) -> Any:
        watch = self.family.watch
        if watch is None or self.region.anchor in _uses_func:
            self.family.watch = None
            return self.region.function(*args, **kwargs)
        with _torch.hooks_allowed():
            _torch.push_hooks(watch, _unread)
            try:
                return self.region.function(*args, **kwargs)
            except RuntimeError as error:
                if not _torch.is_hook_refusal(error):
                    raise
            finally:
                _torch.pop_hooks()
        # The function uses torch.func itself; what the backward reads stays unknown, so all of it runs again.
        _uses_func.add(self.region.anchor)
        raise _Again


class _Again(BaseException):
    """The forward must be run afresh, without watching."""


def _unread(_: Any) -> Any:
    raise RematError(
        "a value of a forward that only watches what is saved was asked for; please report this as a bug in "
        "remat"
    )
