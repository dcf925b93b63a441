"""Blocks of steps compiled from a flat step, for the ops that a compiled graph has in a scan's place.

As `_blocks`, which compiles the user's body by Dynamo; here Dynamo has been at work already, and what is
compiled is a step as the levels around the scan have transformed it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.transforms import _torch_compiler
from remat.transforms._body import Leaves, Step
from remat.transforms._pull import pull
from remat.transforms._scan_state import Tensors


class StepBlocks:
    """Compiled blocks of `size` steps, over flat lists of tensors.

    Args:
        step: `step(consts, carry, x) -> (carry, ys)`.
        consts: what every step reads besides.
        size: how many steps there are in a block.
        made: what was compiled before, by the shapes it is for.
        compiler: a backend of torch.compile.
    """

    def __init__(
        self,
        step: Step,
        consts: Tensors,
        size: int,
        made: dict[Any, Any],
        compiler: Callable[..., Any],
    ) -> None:
        self.step, self.consts, self.size = step, list(consts), size
        self.made, self.compiler = made, compiler

    def run(self, carry: Leaves, xs: Leaves, reverse: bool) -> tuple[Leaves, list[torch.Tensor]]:
        """The carry after a block, and its ys stacked; `xs` are blocks of rows."""
        carry = _dense(carry)
        values = [*self.consts, *carry, *_dense(xs)]
        a, b = len(self.consts), len(self.consts) + len(carry)

        def block(*values: torch.Tensor) -> list[torch.Tensor]:
            state: Leaves = list(values[a:b])
            rows = self._rows(values[b:], reverse)
            columns = []
            for x in rows:
                state, ys = self.step(values[:a], state, x)
                columns.append(ys)
            return [*state, *_stacked(columns, reverse)]

        key = "run", reverse, _signature(values)
        if key not in self.made:
            self.made[key] = self._compiled(block, values)
        outs = self.made[key](*values)
        return list(outs[: len(carry)]), list(outs[len(carry) :])

    def pull(
        self, consts: Tensors, carry: Leaves, xs: Leaves, reverse: bool, cts: Any, needs: tuple[Any, Any]
    ) -> tuple[Any, Any, Any]:
        """Gradients of the consts, the carry and the blocks of xs; `cts`: of the carry, of the stacked ys."""
        carry, xs = _dense(carry), _dense(xs)
        whole = [*cts[0], *cts[1]]
        present = tuple([ct is not None for ct in whole])
        values = [*consts, *carry, *xs, *_dense([ct for ct in whole if ct is not None])]
        a, b, c = len(consts), len(consts) + len(carry), len(consts) + len(carry) + len(xs)
        found: list[bool] = []

        def gradient(*values: torch.Tensor) -> list[torch.Tensor]:
            rest = iter(values[c:])
            given = [next(rest) if here else None for here in present]
            carry_cts, stacks = given[: len(cts[0])], given[len(cts[0]) :]
            rows = self._rows(values[b:c], reverse)
            y_cts = [
                [None if ct is None else ct.select(0, self._at(k, reverse)) for ct in stacks]
                for k in range(self.size)
            ]
            grads = pull(self._several, values[:a], list(values[a:b]), rows, carry_cts, y_cts, needs)
            flat = [*grads[0], *grads[1], *self._x_grads(grads[2], values[b:c], reverse)]
            found[:] = [grad is not None for grad in flat]
            return [grad for grad in flat if grad is not None]

        key = "pull", reverse, present, tuple(needs[0]), tuple(needs[1]), _signature(values)
        if key not in self.made:
            made = self._compiled(gradient, values)
            self.made[key] = made, tuple(found)
        run, here = self.made[key]
        outs = iter(run(*values) if any(here) else ())
        flat = [next(outs) if yes else None for yes in here]
        return flat[:a], flat[a:b], flat[b:]

    def _at(self, k: int, reverse: bool) -> int:
        return self.size - 1 - k if reverse else k

    def _rows(self, xs: Sequence[torch.Tensor], reverse: bool) -> list[list[torch.Tensor]]:
        return [[x.select(0, self._at(k, reverse)) for x in xs] for k in range(self.size)]

    def _several(self, consts: Tensors, carry: Leaves, rows: Any) -> tuple[Leaves, list[Any]]:
        ys = []
        for x in rows:
            carry, y = self.step(consts, carry, x)
            ys.append(y)
        return carry, ys

    def _x_grads(
        self, rows: list[list[torch.Tensor | None]], xs: Sequence[torch.Tensor], reverse: bool
    ) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for i, x in enumerate(xs):
            column = [row[i] for row in (rows[::-1] if reverse else rows)]
            zero = None if all(g is None for g in column) else torch.zeros_like(x.select(0, 0))
            found.append(None if zero is None else torch.stack([zero if g is None else g for g in column]))
        return found

    def _compiled(self, function: Callable[..., Any], values: list[torch.Tensor]) -> Callable[..., Any]:
        # Not the values themselves: rows lie in larger tensors, and forward-mode AD looks at that.
        like = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in values]
        traced = _torch_compiler.traced_functionally(function, like, self.compiler)
        return self.compiler(traced, values) if len(_results(traced)) else (lambda *_: ())


def _results(module: torch.fx.GraphModule) -> Any:
    return module.graph.output_node().args[0]


def _dense(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Alike in every block: compiled code is for certain strides, and rows of a tensor are contiguous.
    return [t.detach().contiguous() for t in tensors]


def _signature(values: Sequence[torch.Tensor]) -> Any:
    return tuple([(t.shape, t.stride(), t.dtype, t.device) for t in values])


def _stacked(columns: list[list[torch.Tensor]], reverse: bool) -> list[torch.Tensor]:
    ordered = columns[::-1] if reverse else columns
    return [torch.stack(column) for column in zip(*ordered, strict=True)]
