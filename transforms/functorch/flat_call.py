"""A region's call as a call of its primitive: arguments, captured tensors and offsets as flat operands."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from remat.transforms.closure import (
    Bindings,
    ClosureConversion,
    as_operand,
    cond_met,
    kept_whole,
    made_inside,
)
from remat.transforms.compat import (
    allow_hooks,
    hooks_disabled,
    is_hook_refusal,
    pop_hooks,
    push_hooks,
    refuse_hooks,
)
from remat.transforms.context import labelled, quiet, run_innermost
from remat.transforms.eager import unread
from remat.transforms.functorch.aliasing import Aliasing
from remat.transforms.functorch.primitive import Family, Prim, World, call
from remat.transforms.pytree import check_results, flatten, merge, split, unflatten
from remat.transforms.region import Region
from remat.transforms.state import Ambient, device_kinds

_NOTHING = contextlib.nullcontext()


class FlatCall:
    """A region's call with every tensor it depends on as a flat operand.

    Args:
        region: what is called.
        leaves: of the arguments; those at the positions `at` are `tensors`.
        spec: the structure of the arguments, None where they are tensors alone.
        captured: what the function reads besides: tensors it closes over, offsets of captures.
        taps: how captures look into it, None where none is open.
        world: where its primitives run, None in eager.
    """

    def __init__(
        self,
        region: Region,
        leaves: Any,
        spec: Any,
        at: Any,
        tensors: Any,
        captured: Any,
        taps: Any,
        world: World | None,
    ) -> None:
        self.region, self.leaves, self.spec, self.at, self.taps = region, leaves, spec, at, taps
        self.count = len(tensors)
        self.captured = captured
        self.operands = [as_operand(t) for t in (*tensors, *captured)]
        self.bindings = Bindings(region.function)
        self.family = Family(region, Ambient(device_kinds(self.operands)), world)
        self.out_leaves: list[Any] = []
        self.out_at: list[int] = []
        self.out_spec: Any = None  # that of a single tensor is None
        self.aliasing = Aliasing()

    def __call__(self) -> Any:
        with labelled("forward", self.region.name):
            outs = call(Prim(self.body, self.family), self.operands)
        made_inside(outs)
        rebuilt = self.aliasing.rebuilt
        # No ops of the user's: a region around, whose two runs may come here by other ways, counts none.
        whole = self.family.world is None
        outs = quiet(rebuilt, outs, self.operands) if whole else rebuilt(outs, self.operands)
        if self.out_spec is None:
            return outs[0]
        out, named = unflatten(merge(self.out_leaves, self.out_at, list(outs)), self.out_spec)
        if self.taps is not None:
            self.taps.pass_on(named)
        return out

    def body(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.family.ambient.casts:
            # Autocast caches casts of leaves; below the levels every operand would be one, above them none.
            operands = tuple([t.view_as(t) for t in operands])
        own, captured = operands[: self.count], operands[self.count :]
        args: Any = own
        kwargs: Any = {}
        if self.spec is not None:
            args, kwargs = unflatten(merge(self.leaves, self.at, list(own)), self.spec)
        table = {id(t): operand for t, operand in zip(self.captured, captured, strict=True)}
        with (
            self.bindings.restored(),
            ClosureConversion(table, own),
            kept_whole() if cond_met.is_set() else _NOTHING,
        ):
            out, named = self._tapped(args, kwargs, table) if self.taps else (self._watched(args, kwargs), ())
        if self.taps is None and isinstance(out, torch.Tensor):
            return self.aliasing.leaving([table.get(id(out), out)], operands)
        check_results(out, self.region.name)
        self.out_leaves, self.out_spec = flatten((out, named))
        tensors, self.out_at = split(self.out_leaves)
        self.out_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in self.out_leaves]
        # A captured tensor may be returned as it is, without any torch call that would have met it.
        tensors = [table.get(id(t), t) for t in tensors]
        return self.aliasing.leaving(tensors, operands)

    def _tapped(self, args: Any, kwargs: Any, table: dict[int, torch.Tensor]) -> tuple[Any, Any]:
        # Named values leave as results like any other: every run of the body has the same ones.
        context, mirrors = self.taps.opened(table)
        with context:
            out = self._watched(args, kwargs)
        return out, self.taps.found(mirrors)

    def _watched(self, args: Any, kwargs: Any) -> Any:
        watch = self.family.watch
        if watch is None or self.region.cache.uses_func:
            self.family.watch = None
            return run_innermost(self.region.function, self.region.selector is not None, args, kwargs)
        # torch.func refuses hooks; these only watch, and their values are never asked for.
        message = hooks_disabled()
        allow_hooks()
        push_hooks(watch, unread)
        try:
            return run_innermost(self.region.function, self.region.selector is not None, args, kwargs)
        except RuntimeError as error:
            if not is_hook_refusal(error):
                raise
        finally:
            pop_hooks()
            if message is not None:
                refuse_hooks(message)
        # The function uses torch.func itself; what the backward reads stays unknown, so all of it runs again.
        self.region.cache.uses_func = True
        raise WatchingRefused


class WatchingRefused(BaseException):
    """The forward must be run afresh, without watching."""
