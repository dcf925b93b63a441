"""A scan's body between the user's pytrees and the flat lists that the machinery works on."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.transforms.closure import Swap, made_inside, swapping
from remat.transforms.compat import is_wrapped, unwrapped
from remat.transforms.errors import RematError
from remat.transforms.intermediates import Refusal, current, only
from remat.transforms.pytree import Spec, flatten, merge, paths, unflatten

Leaves = list[Any]
Step = Callable[[Sequence[torch.Tensor], Leaves, Sequence[torch.Tensor]], tuple[Leaves, list[torch.Tensor]]]


_AS_IT_IS = contextlib.nullcontext()


class Body:
    """`body(carry, x) -> (carry, y)` as a step over flat lists: `step(consts, carry, x) -> (carry, ys)`.

    `consts` stand for the captured tensors. Where they are the captured tensors themselves the body runs as
    it is; elsewhere (below functorch levels, in a pull-back that differentiates them) they are put in their
    place.

    Args:
        function: the user's body.
        init: the initial carry; its structure, shapes and dtypes hold for every step.
        xs: the stacked inputs, whose leaves are tensors or None.
        captured: the captured tensors that carry a derivative or a batch dimension.
        name: how messages call the scan.
        eager: what runs where captured tensors are swapped, by a mode that a compiled body would not see.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        init: Any,
        xs: Any,
        captured: list[torch.Tensor],
        name: str,
        eager: Callable[..., Any] | None = None,
    ) -> None:
        self.function, self.captured, self.name = function, captured, name
        self.eager = eager or function
        rows, self.x_spec = flatten(xs)
        self.x_at = [i for i, row in enumerate(rows) if row is not None]
        self.x_blank: Leaves = [None] * len(rows)
        self.paths = paths(init)
        leaves, self.carry_spec = flatten(init)
        self.types = [_type(leaf) for leaf in leaves]
        # The common shapes go without the pytree machinery, which costs more than a small op.
        self.carry_is_leaf, self.x_is_leaf = self.carry_spec.is_leaf(), self.x_spec.is_leaf()
        self.y_spec: Spec | None = None
        self.y_types: list[Any] = []
        self.y_is_leaf = False
        self.trusted = False

    def __call__(
        self, consts: Sequence[torch.Tensor], carry: Leaves, x: Sequence[torch.Tensor]
    ) -> tuple[Leaves, list[torch.Tensor]]:
        if current():
            with self._closed():
                return self._step(consts, carry, x)
        return self._step(consts, carry, x)

    def _step(
        self, consts: Sequence[torch.Tensor], carry: Leaves, x: Sequence[torch.Tensor]
    ) -> tuple[Leaves, list[torch.Tensor]]:
        if swapping():
            # A rule that wraps operands anew makes no torch call that the region around would have seen.
            fresh = [new for old, new in zip(self.captured, consts, strict=True) if new is not old]
            made_inside([t for t in (*fresh, *carry, *x) if isinstance(t, torch.Tensor)])
        row = self._row(x)
        if self.trusted and (not consts or all(map(operator.is_, consts, self.captured))):
            if self.carry_is_leaf and self.y_is_leaf:
                return self._lean(carry, row)
            versions, out = self._evaluated(self.function, carry, row)
        else:
            with self.swapped(consts, [*carry, *x]):
                versions, out = self._evaluated(self.eager, carry, row)
        self.trusted = True
        return self._checked(out, carry, versions)

    def _row(self, x: Sequence[torch.Tensor]) -> Any:
        if self.x_is_leaf:
            return x[0] if x else None
        return unflatten(merge(self.x_blank, self.x_at, list(x)), self.x_spec)

    def _evaluated(self, function: Callable[..., Any], carry: Leaves, row: Any) -> tuple[list[int], Any]:
        versions = [version(leaf) for leaf in carry]
        state = carry[0] if self.carry_is_leaf else unflatten(carry, self.carry_spec)
        return versions, function(state, row)

    def _lean(self, carry: Leaves, row: Any) -> tuple[Leaves, list[torch.Tensor]]:
        """A later step whose carry and y are single leaves: checked by hand, as small steps take longer to
        check than to run."""
        (state,) = carry
        before = version(state)
        out = self.function(state, row)
        if type(out) is tuple and len(out) == 2 and version(state) == before:
            new, y = out
            if type(new) is torch.Tensor and (new.shape, new.dtype) == self.types[0]:
                if y is None and self.y_types[0] is type(None):
                    return [new], []
                if type(y) is torch.Tensor and (y.shape, y.dtype) == self.y_types[0]:
                    return [new], [y]
        return self._checked(out, carry, [before])

    def _closed(self) -> Any:
        return only([Refusal(session.wanted, self.name) for session in current()])

    # -- several steps at once: rows and ys are stacked ------------------------------------------------

    def trees(self, carry: Leaves, xs: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """Carry and xs as the body's trees."""
        rows = unflatten(merge(self.x_blank, self.x_at, list(xs)), self.x_spec)
        return unflatten(carry, self.carry_spec), rows

    def ct_trees(self, cts: Sequence[Any], y_cts: Sequence[Any]) -> tuple[Any, Any]:
        """Cotangents as trees of the carry and of the ys, None where there is none."""
        assert self.y_spec is not None
        rest = iter(y_cts)
        ys = [None if kind is type(None) else next(rest) for kind in self.y_types]
        return unflatten(list(cts), self.carry_spec), unflatten(ys, self.y_spec)

    def checked_block(
        self, out: Any, carry: Leaves, versions: list[int]
    ) -> tuple[Leaves, list[torch.Tensor]]:
        """The flat carry and stacked ys that a block returned."""
        end, ys = out
        leaves, spec = flatten(ys)
        one = [y.select(0, 0) if isinstance(y, torch.Tensor) else y for y in leaves]
        flat, _ = self._checked((end, unflatten(one, spec)), carry, versions)
        return flat, [y for y in leaves if y is not None]

    def swapped(self, consts: Sequence[torch.Tensor], operands: Leaves) -> Any:
        """The context in which a function of the user's reads `consts` for what it captured."""
        if self.trusted and all(map(operator.is_, consts, self.captured)):
            return _AS_IT_IS
        table = {id(old): new for old, new in zip(self.captured, consts, strict=True)}
        tensors = [leaf for leaf in operands if isinstance(leaf, torch.Tensor)]
        return Swap(table, tensors)

    def _checked(self, out: Any, carry: Leaves, versions: list[int]) -> tuple[Leaves, list[torch.Tensor]]:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"{self.name}: the body returned {_brief(out)}; it must return a pair (carry, y), y None "
                "where nothing is to be stacked."
            )
        for path, leaf, before in zip(self.paths, carry, versions, strict=True):
            if version(leaf) != before:
                raise RematError(
                    f"{self.name}: the body wrote into its carry{path} in place. The recomputation would "
                    "start from what was written; make a new tensor (`carry = carry + ...`) and return it."
                )
        return self._carry(out[0]), self._ys(out[1])

    def _carry(self, tree: Any) -> Leaves:
        leaves, spec = flatten(tree)
        if spec != self.carry_spec:
            raise TypeError(
                f"{self.name}: the body returned a carry of structure {spec}, but the carry that came in has "
                f"{self.carry_spec}; both must be the same at every step."
            )
        for path, leaf, kind in zip(self.paths, leaves, self.types, strict=True):
            if _type(leaf) != kind:
                raise TypeError(
                    f"{self.name}: carry{path} came in as {_say(kind)} and was returned as "
                    f"{_say(_type(leaf))}; shape, dtype and Python type of the carry must be the same at "
                    "every step. Cast or reshape the initial value, or what the body returns."
                )
        return leaves

    def _ys(self, tree: Any) -> list[torch.Tensor]:
        leaves, spec = flatten(tree)
        if self.y_spec is None:
            for path, leaf in zip(paths(tree), leaves, strict=True):
                if not isinstance(leaf, torch.Tensor) and leaf is not None:
                    raise TypeError(
                        f"{self.name}: y{path} is {_say(_type(leaf))}; the ys are stacked, so they must be "
                        "tensors (or None for nothing): write torch.as_tensor(...)."
                    )
            self.y_spec, self.y_types = spec, [_type(leaf) for leaf in leaves]
            self.y_is_leaf = spec.is_leaf()
        if spec != self.y_spec or [_type(leaf) for leaf in leaves] != self.y_types:
            raise TypeError(
                f"{self.name}: y is {[_say(_type(leaf)) for leaf in leaves]} in this step and was "
                f"{[_say(kind) for kind in self.y_types]} in the first; ys are stacked and must not change."
            )
        return [leaf for leaf in leaves if leaf is not None]

    def stacked(self, ys: Sequence[torch.Tensor]) -> Any:
        """The tree of ys, None where the body returned None."""
        assert self.y_spec is not None
        rest = iter(ys)
        return unflatten([None if kind is type(None) else next(rest) for kind in self.y_types], self.y_spec)


def version(leaf: Any) -> int:
    """The number of writes into a tensor so far; 0 for what does not count them."""
    if not isinstance(leaf, torch.Tensor):
        return 0
    # The wrapper that vmap makes does not count.
    plain = unwrapped(leaf) if is_wrapped(leaf) else leaf
    return 0 if plain.is_inference() else plain._version


def _type(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)


def _say(kind: Any) -> str:
    return (
        kind.__name__ if isinstance(kind, type) else f"{str(kind[1]).removeprefix('torch.')}{list(kind[0])}"
    )


def _brief(value: Any) -> str:
    return (
        f"{type(value).__name__} of length {len(value)}" if isinstance(value, tuple) else type(value).__name__
    )
