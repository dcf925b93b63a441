"""The pull-back of a few steps, by the means of the world it runs in."""

from __future__ import annotations

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
    at = [i for i, leaf in enumerate(carry) if is_tensor(leaf)]
    states = [carry[i] for i in at]
    marks = [need and smooth(c) for c, need in zip(consts, needs[0], strict=True)]
    marks += map(smooth, states)
    for row in rows:
        marks += [need and smooth(x) for x, need in zip(row, needs[1], strict=True)]
    flat = [*consts, *states]
    for row in rows:
        flat += row
    head, body, width = len(consts), len(consts) + len(at), len(needs[1])

    def outputs(values: Sequence[torch.Tensor]) -> list[Any]:
        full = merge(carry, at, values[head:body])
        tail = (
            [values[i : i + width] for i in range(body, body + width * len(rows), width)] if width else rows
        )
        end, ys = steps(values[:head], full, tail)
        outs = [end[i] for i in at]
        for row in ys:
            outs += row
        return outs

    cts = list(carry_cts)
    for row in y_cts:
        cts += row
    if by_func(flat):
        grads = _with_func(outputs, flat, marks, cts, over)
    else:
        grads = _with_autograd(outputs, flat, marks, cts, over, head)
    tail = [grads[i : i + width] for i in range(body, len(grads), width)] if width else [[] for _ in rows]
    return grads[:head], grads[head:body], tail


def by_func(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether torch.func differentiates steps: under its levels, and where plain autograd records nothing or
    saves none of the tensors (inference mode)."""
    return in_transform() or not outside_inference() or any([t.is_inference() for t in tensors])


class OneByOne:
    """`pull` of one step after another, by plain autograd: what is alike in all is looked at once.

    Args:
        consts: what every step reads besides.
        needs: which consts and which xs want a gradient.
    """

    def __init__(self, consts: Sequence[torch.Tensor], needs: tuple[list[bool], list[bool]]) -> None:
        self.needs = needs
        self.marks = [need and smooth(c) for c, need in zip(consts, needs[0], strict=True)]
        self.consts = [_alias(c, False, True) if m else c for c, m in zip(consts, self.marks, strict=True)]
        self.targets = [c for c, mark in zip(self.consts, self.marks, strict=True) if mark]
        self.others = _others(self.consts, consts)

    def __call__(
        self, step: Callable[..., Any], carry: list[Any], x: list[torch.Tensor], cts: Grads
    ) -> tuple[Grads, Grads, list[Grads]]:
        """Gradients as `pull` has them; `cts`: of the carry's tensors and of ys."""
        targets, marks, at = list(self.targets), list(self.marks), []
        with torch.enable_grad():
            state, row = list(carry), []
            for i, leaf in enumerate(carry):
                if is_tensor(leaf):
                    at.append(i)
                    marks.append(smooth(leaf))
                    state[i] = own = leaf.detach()
                    if marks[-1]:
                        targets.append(own.requires_grad_())
            for t, need in zip(x, self.needs[1], strict=True):
                row.append(own := t.detach())
                marks.append(need and smooth(t))
                if marks[-1]:
                    targets.append(own.requires_grad_())
            (new, ys), last = noting(step, self.consts, state, row)
        with in_backward(last):
            grads = _pulled([*(new[i] for i in at), *ys], cts, targets, marks, False, ())
        if self.others:
            _handed_on(self.others)
        a, b = len(self.marks), len(self.marks) + len(at)
        return grads[:a], grads[a:b], [grads[b:]]


def _with_autograd(
    outputs: Callable[..., list[Any]],
    flat: list[torch.Tensor],
    marks: list[bool],
    cts: Grads,
    over: Over,
    consts: int,
) -> Grads:
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        # An alias each: a gradient must not run on from one operand into another that it was made from. A
        # leaf without hooks is its own alias, and lets a body that holds it run without swapping.
        values = [
            _alias(t, create, i < consts) if mark else t if create or i < consts else t.detach()
            for i, (t, mark) in enumerate(zip(flat, marks, strict=True))
        ]
        outs, last = noting(outputs, values)
    targets = [v for v, mark in zip(values, marks, strict=True) if mark]
    with in_backward(last):
        grads = _pulled(outs, cts, targets, marks, create, over)
    _handed_on(_others(values[:consts], flat))
    return grads


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


def _with_func(
    outputs: Callable[..., list[Any]], flat: list[torch.Tensor], marks: list[bool], cts: Grads, over: Over
) -> Grads:
    at = [i for i, mark in enumerate(marks) if mark]
    if all(ct is None for ct in cts):
        return [None] * len(flat)

    def chosen(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        full = merge(flat, at, values)
        return tuple(o for o, ct in zip(outputs(full), cts, strict=True) if ct is not None)

    (_, vjp), last = noting(torch.func.vjp, chosen, *(flat[i] for i in at))
    with in_backward(last):
        grads = _mapped(lambda *cts: vjp(cts), [ct for ct in cts if ct is not None], over)
        found = dict(zip(at, grads, strict=True))
    return [found.get(i) for i in range(len(flat))]
