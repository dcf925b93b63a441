"""The pull-back of a few steps, by the means of the world it runs in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.transforms.compat import (
    engine_grad,
    functions_as_they_are,
    in_transform,
    outside_inference,
)
from remat.transforms.objects import is_tensor
from remat.transforms.pytree import merge, smooth
from remat.transforms.state import in_backward, noting

Grads = list[torch.Tensor | None]
Over = Sequence[tuple[int, str]]


def pull(
    steps: Callable[..., Any],
    consts: Sequence[torch.Tensor],
    carry: list[Any],
    rows: list[list[torch.Tensor]],
    carry_cts: Grads,
    y_cts: list[Grads],
    needs: tuple[list[bool], list[bool]],
    over: Over = (),
) -> tuple[Grads, Grads, list[Grads]]:
    """Gradients of `steps(consts, carry, rows) -> (carry, ys of each row)`.

    Args:
        carry_cts: cotangents of the carry's tensors, in order; None is zero.
        y_cts: cotangents of each row's ys.
        needs: which consts and which xs want a gradient; every float tensor of the carry does.
        over: the vmaps whose batches are leading dimensions of cotangents and gradients.

    Returns:
        Gradients of the consts, of the carry's tensors and of each row's xs; None is zero or not wanted.

    With no functorch level active plain autograd does it: faster, and the only way for bodies that hold an
    autograd.Function without `setup_context`. The result is differentiable where grad mode is on.
    """
    given = [*consts, *filter(is_tensor, carry), *itertools.chain(*rows)]
    return Pull(consts, needs, over, by_func(given))(steps, carry, rows, carry_cts, y_cts)


def _apart(grads: Grads, head: int, body: int, rows: list[Any]) -> tuple[Grads, Grads, list[Grads]]:
    """Gradients of consts, of the carry, of each row."""
    width = len(rows[0])
    by_row = [grads[body + k * width : body + (k + 1) * width] for k in range(len(rows))]
    return grads[:head], grads[head:body], by_row


def by_func(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether torch.func differentiates steps: under its levels, and where plain autograd records nothing or
    saves none of the tensors (inference mode)."""
    return in_transform() or not outside_inference() or any([t.is_inference() for t in tensors])


class Pull:
    """`pull` of one segment after another: what is alike in all is looked at once.

    Args:
        consts, needs, over: as for `pull`.
        func: whether torch.func differentiates.
    """

    def __init__(
        self, consts: Sequence[torch.Tensor], needs: tuple[list[bool], list[bool]], over: Over, func: bool
    ) -> None:
        self.needs, self.over, self.create = needs, over, torch.is_grad_enabled()
        self.marks = [need and smooth(c) for c, need in zip(consts, needs[0], strict=True)]
        self.func, self.given = func, list(consts)
        if func:
            return
        pairs = zip(consts, self.marks, strict=True)
        self.consts = [_alias(c, self.create, True) if mark else c for c, mark in pairs]
        self.targets = [c for c, mark in zip(self.consts, self.marks, strict=True) if mark]
        self.others = _others(self.consts, consts)

    def __call__(
        self,
        steps: Callable[..., Any],
        carry: list[Any],
        rows: list[list[torch.Tensor]],
        carry_cts: Grads,
        y_cts: list[Grads],
    ) -> tuple[Grads, Grads, list[Grads]]:
        if self.func:
            return self._by_func(steps, carry, rows, [*carry_cts, *itertools.chain(*y_cts)])
        targets, marks, at = list(self.targets), list(self.marks), []
        state, mine, needs = list(carry), [], self.needs[1]
        with torch.enable_grad():
            for i, leaf in enumerate(carry):
                if is_tensor(leaf):
                    at.append(i)
                    marks.append(smooth(leaf))
                    state[i] = self._own(leaf, marks[-1], targets)
            for row in rows:
                mine.append(own := [])
                for x, need in zip(row, needs, strict=True):
                    marks.append(need and smooth(x))
                    own.append(self._own(x, marks[-1], targets))
            (new, ys), last = noting(steps, self.consts, state, mine)
        outs, cts = [*(new[i] for i in at), *itertools.chain(*ys)], [*carry_cts, *itertools.chain(*y_cts)]
        with in_backward(last):
            grads = _pulled(outs, cts, targets, marks, self.create, self.over)
        if self.others:
            _handed_on(self.others)
        return _apart(grads, len(self.marks), len(self.marks) + len(at), rows)

    def _by_func(
        self, steps: Callable[..., Any], carry: list[Any], rows: list[list[torch.Tensor]], cts: Grads
    ) -> tuple[Grads, Grads, list[Grads]]:
        at = [i for i, leaf in enumerate(carry) if is_tensor(leaf)]
        head, body = len(self.given), len(self.given) + len(at)
        flat = [*self.given, *(carry[i] for i in at), *itertools.chain(*rows)]
        marks = [*self.marks, *(smooth(carry[i]) for i in at)]
        marks += [need and smooth(x) for row in rows for x, need in zip(row, self.needs[1], strict=True)]
        wanted, given = [i for i, mark in enumerate(marks) if mark], [ct for ct in cts if ct is not None]

        def chosen(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = merge(flat, wanted, values)
            rest = iter(full[body:])
            tail = [[next(rest) for _ in row] for row in rows]
            end, ys = steps(full[:head], merge(carry, at, full[head:body]), tail)
            outs = [*(end[i] for i in at), *itertools.chain(*ys)]
            return tuple(o for o, ct in zip(outs, cts, strict=True) if ct is not None)

        grads: Grads = [None] * len(flat)
        if given:
            (_, vjp), last = noting(torch.func.vjp, chosen, *(flat[i] for i in wanted))
            with in_backward(last):
                grads = merge(grads, wanted, _mapped(lambda *cts: vjp(cts), given, self.over))
        return _apart(grads, head, body, rows)

    def _own(self, tensor: torch.Tensor, mark: bool, targets: list[torch.Tensor]) -> torch.Tensor:
        # An alias each: a gradient must not run on from one operand into another that it was made from.
        if self.create:
            own = _alias(tensor, True, False) if mark else tensor
        else:
            own = tensor.detach().requires_grad_(mark)
        if mark:
            targets.append(own)
        return own


def _pulled(
    outs: list[Any], cts: Grads, targets: list[torch.Tensor], marks: list[bool], create: bool, over: Over
) -> Grads:
    """Gradients of the targets, which are the marked ones; None for the others."""
    ends, starts = [], []
    for out, ct in zip(outs, cts, strict=True):
        if ct is not None and out.requires_grad:
            ends.append(out)
            # Forward mode hands out zeros without memory, into which a formula may write.
            starts.append(ct.clone() if ct._is_zerotensor() else ct)
    if not ends or not targets:
        return [None] * len(marks)

    def back(*starts: torch.Tensor) -> Any:
        return engine_grad(tuple(ends), starts, create, create, tuple(targets))

    found = iter(_mapped(back, starts, over))
    return [next(found) if mark else None for mark in marks]


def _mapped(back: Callable[..., Any], cts: list[torch.Tensor], over: Over) -> Sequence[torch.Tensor | None]:
    """`back(*cts)` under these vmaps, the outermost first."""
    if not over:
        return back(*cts)
    there: list[bool] = []

    def tensors(*cts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grads = back(*cts)
        there[:] = [g is not None for g in grads]
        return tuple(g for g in grads if g is not None)

    for _, randomness in reversed(over):
        tensors = torch.vmap(tensors, randomness=randomness)
    found = iter(tensors(*cts))
    return [next(found) if is_there else None for is_there in there]


def _alias(tensor: torch.Tensor, create: bool, const: bool) -> torch.Tensor:
    # A leaf without hooks is its own alias, and lets a body that holds it run without swapping.
    if const and tensor.is_leaf and tensor.requires_grad and not tensor._backward_hooks:
        # A view made without grad mode says that it is a leaf too, and gets no gradient.
        if not tensor._is_view():
            return tensor
    if create and tensor.requires_grad:
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_()


def _others(aliases: Sequence[torch.Tensor], consts: Sequence[torch.Tensor]) -> list[Any]:
    """The aliases of consts that are leaves of their own, each with what it stands for."""
    pairs = zip(aliases, consts, strict=False)
    return [(v, _itself(t)) for v, t in pairs if v is not t and v.is_leaf and v.requires_grad]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    """The leaf that a look at it stands for: under torch-function modes scans are given such."""
    base = tensor._base
    return base if base is not None and tensor.is_leaf and base.is_leaf else tensor


def _handed_on(others: list[Any]) -> None:
    """A Function in the body may go backward itself, and accumulate into the leaves that it reads: those of
    the step's own pass on what they were given."""
    with functions_as_they_are():
        for alias, own in others:
            if (gradient := alias.grad) is not None:
                alias.grad = None
                torch.autograd.backward(own, gradient)
