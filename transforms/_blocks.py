"""Blocks of a scan's steps, compiled: one graph that runs a block, one that pulls back through it.

Dynamo traces the user's body (its closures guarded and lifted) unrolled `SIZE` times. For the pull-back it
traces the inner product of results and cotangents; the backend then replaces that graph by its gradient, so
that a block costs one call without autograd's bookkeeping, whatever the scan's length.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as torch_pytree

from remat.transforms import _torch, _tree
from remat.transforms._body import Body, Leaves, version
from remat.transforms._scan_state import Tensors

SIZE = 8
_local = threading.local()
# Dynamo counts recompilations by code object: every body gets a copy of its own.
_copies: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def _steps(function: Any, carry: Any, rows: Any, count: int, reverse: bool) -> tuple[Any, Any]:
    ys = []
    for k in range(count):
        at = count - 1 - k if reverse else k
        x = torch_pytree.tree_map(lambda t, at=at: None if t is None else t[at], rows)
        carry, y = function(carry, x)
        ys.append(y)
    ordered = ys[::-1] if reverse else ys

    def stacked(*leaves: Any) -> Any:
        return torch.stack(leaves) if isinstance(leaves[0], torch.Tensor) else leaves[0]

    return carry, torch_pytree.tree_map(stacked, *ordered)


def _product(
    steps: Any, function: Any, carry: Any, rows: Any, count: int, reverse: bool, cts: Any, y_cts: Any
) -> torch.Tensor:
    """<results, cotangents>: its gradient is the pull-back."""
    end, ys = steps(function, carry, rows, count, reverse)
    return torch.zeros((), dtype=torch.float64) + _inner(end, cts) + _inner(ys, y_cts)


def _inner(out: Any, ct: Any) -> Any:
    if ct is None or out is None:
        return 0.0
    if isinstance(out, torch.Tensor):
        return (out * ct).sum()
    if isinstance(out, dict):
        return sum([_inner(out[key], ct[key]) for key in out])
    return sum([_inner(a, b) for a, b in zip(out, ct, strict=True)])


class _Ask:
    """What a pull-back wants: gradients of `targets`, left in `grads`."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self.targets = targets
        self.grads: list[torch.Tensor | None] = [None] * len(targets)


class Blocks:
    """The compiled blocks of a body, over flat lists as `Body` has them.

    Args:
        body: the body between flat lists and trees.
        function: what the user wrote.
        backend: a backend of torch.compile.
    """

    def __init__(self, body: Body, function: Callable[..., Any], backend: str) -> None:
        self.body, self.function = body, function
        code = getattr(function, "__code__", None) or getattr(type(function), "forward", _steps).__code__
        key = code, backend
        if key not in _copies:
            steps, product, make = _copied(_steps), _copied(_product), torch.compile

            def pulled(*args: Any) -> torch.Tensor:
                return product(steps, *args)

            _copies[key] = (
                make(steps, backend=backend, fullgraph=True, dynamic=False),
                make(_copied(pulled), backend=_gradient(backend), fullgraph=True, dynamic=False),
            )
        self._run, self._pull = _copies[key]

    size = SIZE

    @staticmethod
    def fits(carry: Leaves) -> bool:
        """Whether the carry is all tensors: a number that changes would be a constant of the graph."""
        return all(isinstance(leaf, torch.Tensor) and not leaf.is_complex() for leaf in carry)

    def run(self, carry: Leaves, xs: Leaves, reverse: bool) -> tuple[Leaves, list[torch.Tensor]]:
        """The carry after a block, and its ys stacked; `xs` are blocks of rows."""
        versions = [version(leaf) for leaf in carry]
        # Alike in every block, so that Dynamo's guards hold: the user's first carry may be part of a graph.
        carry = [leaf.detach() for leaf in carry]
        with torch.no_grad():
            out = self._run(self.function, *self.body.trees(carry, xs), SIZE, reverse)
        return self.body.checked_block(out, carry, versions)

    def pull(
        self, consts: Tensors, carry: Leaves, xs: Leaves, reverse: bool, cts: Any, needs: tuple[Any, Any]
    ) -> tuple[Any, Any, Any]:
        """Gradients of the consts, the carry and the blocks of xs; `cts`: of the carry, of the stacked ys."""
        carry = [leaf.detach() for leaf in carry]  # what the graph reads is told apart by identity
        wanted = [*needs[0], *map(_tree.smooth, carry), *needs[1]]
        full = [*consts, *carry, *xs]
        ask = _Ask([t for t, want in zip(full, wanted, strict=True) if want and _tree.smooth(t)])
        # The first cotangent is often an expanded number; guards are on strides too.
        dense = [[None if ct is None else ct.contiguous() for ct in part] for part in cts]
        end, ys = self.body.ct_trees(*dense)
        before, _local.ask = getattr(_local, "ask", None), ask
        try:
            with torch.no_grad():
                self._pull(self.function, *self.body.trees(carry, xs), SIZE, reverse, end, ys)
        finally:
            _local.ask = before
        found = iter(ask.grads)
        grads = [
            next(found) if want and _tree.smooth(t) else None for t, want in zip(full, wanted, strict=True)
        ]
        a, b = len(consts), len(consts) + len(carry)
        return grads[:a], grads[a:b], grads[b:]


def _copied(function: Any) -> Any:
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


def _gradient(backend: str) -> Callable[..., Any]:
    """A backend that compiles the gradient of a graph's one result instead of the graph."""

    def compiler(graph: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        made: dict[tuple[int, ...], tuple[Callable[..., Any], list[int]]] = {}
        result = torch.zeros((), dtype=torch.float64)

        def call(*inputs: Any) -> tuple[torch.Tensor]:
            ask: _Ask = _local.ask
            places = {id(t): i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)}
            at = tuple(places.get(id(t), -1) for t in ask.targets)
            if at not in made:
                made[at] = _compiled_gradient(graph, inputs, at, backend)
            run, slots = made[at]
            for slot, grad in zip(slots, run(*inputs), strict=True):
                ask.grads[slot] = grad
            return (result,)

        return call

    return compiler


def _compiled_gradient(
    graph: torch.fx.GraphModule, inputs: tuple[Any, ...], at: tuple[int, ...], backend: str
) -> tuple[Callable[..., Any], list[int]]:
    from torch.fx.experimental.proxy_tensor import make_fx

    slots: list[int] = []

    def gradient(*values: Any) -> list[torch.Tensor]:
        full = list(values)
        wanted = {i for i in at if i >= 0}
        with torch.enable_grad():
            full = [
                v.detach().requires_grad_(i in wanted) if isinstance(v, torch.Tensor) else v
                for i, v in enumerate(full)
            ]
            (out,) = graph(*full)
        if not out.requires_grad:
            return []
        targets = [(slot, full[i]) for slot, i in enumerate(at) if i >= 0]
        found = torch.autograd.grad(out, [t for _, t in targets], allow_unused=True)
        slots[:] = [slot for (slot, _), g in zip(targets, found, strict=True) if g is not None]
        return [g for g in found if g is not None]

    with torch.no_grad():
        plain = [v.detach() if isinstance(v, torch.Tensor) else v for v in inputs]
        traced = make_fx(gradient, tracing_mode="fake")(*plain)
        if not slots:
            return (lambda *values: ()), slots
        return _torch.backend(backend)(traced, plain), slots
