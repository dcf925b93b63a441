"""Results of a region that lie in one memory, or in that of its operands.

A node of autograd returns tensors that know nothing of each other: what is written to one of them later is
seen in the others, but not by their derivatives. So of results that look into each other one leaves the
node, and the others are made of it outside, where autograd follows. Those that look into an operand are made
of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from remat.transforms.compat import (
    functions_as_they_are,
    graph_storage,
    has_tangent,
    in_forward_mode,
    is_wrapped,
    memory_is_real,
    unwrap_once,
    unwrapped,
)
from remat.transforms.context import enclosing, node_of, untracked
from remat.transforms.errors import RematError, not_repeated
from remat.transforms.functorch.primitive import cut_off
from remat.transforms.ops import grouped
from remat.transforms.tape import Recorder, Replay

Tensors = Sequence[torch.Tensor]


class AliasSpec(NamedTuple):
    """A view of another tensor: which one, and shape, stride and start there. Without a shape it is that
    tensor itself.

    Attributes:
        base: the number of a result, or `~i` for operand i.
        order: its dimensions as they lie in memory.
        real: whether the view is one of the parts of a complex base.
    """

    base: int
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    start: Any = 0
    order: tuple[int, ...] = ()
    real: bool = False


class HiddenBase(NamedTuple):
    """A tensor that no result is, and that several are views of.

    Attributes:
        number: what their specs call it.
        at: a result that is a view of it.
        shape, order: its shape, and its dimensions as they lie in memory.
    """

    number: int
    at: int
    shape: tuple[int, ...]
    order: tuple[int, ...]


class Aliasing:
    """Which results of a region leave its node, and how the others are made of those.

    That is learnt where the function runs first, and is the same where it runs again.
    """

    def __init__(self) -> None:
        self.known = False
        # Which values of a tape the results are, where the run was recorded; None for aliases of some.
        self.tape: Any = None
        self.numbers: list[int | None] = []
        # For every result how to see it in another tensor, None where it leaves; None: all of them do.
        self.specs: list[AliasSpec | None] | None = None
        # Bases that leave the node too: each holds several results, and is none itself.
        self.hidden: list[HiddenBase] = []

    def leaving(
        self, results: Tensors, operands: Tensors, present: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """What leaves the node; `present`: those of it that are pulled back from, None for all."""
        # Asked of tensors whose attributes a torch-function mode would take for calls of the user's.
        with functions_as_they_are():
            if not self.known:
                self.known = True
                self._learn(results, operands)
            self._follow(results, present)
        if self.specs is None:
            return tuple(results) or (untracked(torch.zeros, ()),)  # torch.func wants one
        own = [t for t, spec in zip(results, self.specs, strict=True) if spec is None]
        bases = [self._hidden_base(hidden, results) for hidden in self.hidden]
        return (*own, *bases) or (untracked(torch.zeros, ()),)

    def _follow(self, results: Tensors, present: Sequence[int] | None) -> None:
        """Note which values are returned, or find the same in a later run: one of the same ops may return
        another of their results, by a flag that was turned since."""
        mode = enclosing()
        if self.tape is None and isinstance(mode, Recorder) and mode.reruns:
            self.tape, self.numbers = mode.tape, [mode.bound(unwrapped(t)) for t in results]
        elif isinstance(mode, Replay) and mode.tape is self.tape and mode.operands is not None:
            pulled = [(self.numbers[i], unwrapped(results[i])) for i in self._pulled(len(results), present)]
            known = [(number, tensor) for number, tensor in pulled if number is not None]
            if (unlike := mode.operands.unlike(known, mode.absent)) and memory_is_real():
                raise RematError(not_repeated(mode.tape.region, f"it returned {unlike}"))

    def _pulled(self, count: int, present: Sequence[int] | None) -> list[int]:
        """Which of so many results are pulled back from."""
        if self.specs is None:
            return list(range(count) if present is None else present)
        own = [i for i, spec in enumerate(self.specs) if spec is None]
        left = [*own, *[hidden.number for hidden in self.hidden]]
        taken = {i for at, i in enumerate(left) if present is None or at in present}
        return [i for i, spec in enumerate(self.specs) if (i if spec is None else spec.base) in taken]

    def rebuilt(self, made: Tensors, operands: Tensors) -> list[torch.Tensor]:
        """All results, given what left the node."""
        if self.specs is None:
            return list(made)
        left = iter(made)
        found: list[Any] = [next(left) if spec is None else None for spec in self.specs]
        found.extend(left)

        return [self._result(i, found, operands) for i in range(len(self.specs))]

    def _result(self, i: int, found: list[Any], operands: Tensors) -> torch.Tensor:
        """Result `i`. (A function inside of another that calls itself is a cycle, which holds results.)"""
        if i < 0:
            return operands[~i]
        if found[i] is None:
            assert self.specs is not None and (spec := self.specs[i]) is not None
            found[i] = _made(self._result(spec.base, found, operands), spec)
        return found[i]

    def _learn(self, results: Tensors, operands: Tensors) -> None:
        together, given = grouped(map(_memory, results)), grouped(map(_memory, operands))
        together.pop(None, None)
        specs: list[AliasSpec | None] = [None] * len(results)
        for memory, group in together.items():
            left = _seen_in(specs, results, group, [(~i, operands[i]) for i in given.get(memory, ())])
            if len(left) > 1:
                self._learn_among(specs, results, left)
        if any(spec is not None for spec in specs):
            self.specs = specs

    def _learn_among(self, specs: list[AliasSpec | None], results: Tensors, group: list[int]) -> None:
        # One tensor twice is one tensor, whatever it looks like.
        twins = {i: next(j for j in group if results[j] is results[i]) for i in group}
        for i, first in twins.items():
            specs[i] = None if i == first else AliasSpec(first)
        left = group = [i for i in group if specs[i] is None]
        if whole := [i for i in group if _order(results[i]) is not None]:
            base = max(whole, key=lambda i: results[i].numel())
            rest = [i for i in group if i != base]
            left = [base, *_seen_in(specs, results, rest, [(base, results[base])])]
        # None of them holds all: what they are views of may.
        at = next((i for i in left if results[i]._base is not None), None)
        if len(left) > 1 and at is not None:
            number = len(results) + len(self.hidden)
            base: Any = results[at]._base
            if len(_seen_in(specs, results, left, [(number, base)])) < len(left):
                self.hidden.append(HiddenBase(number, at, tuple(base.shape), _order(base) or ()))

    def _hidden_base(self, hidden: HiddenBase, results: Tensors) -> torch.Tensor:
        """The base of results: the one that they are views of, if it is as where the function ran first.

        A region inside may run as a node here, and by plain autograd there, where its result is a view.
        """
        assert self.specs is not None
        pairs = zip(results, self.specs, strict=True)
        group = [(t, spec) for t, spec in pairs if spec is not None and spec.base == hidden.number]
        with functions_as_they_are():
            base = results[hidden.at]._base
            if base is not None and base.shape == hidden.shape and (order := _order(base)) is not None:
                if all(_spec(t, base, hidden.number, order) == spec for t, spec in group):
                    return base
        return untracked(_gathered, group, hidden)


def _memory(tensor: torch.Tensor) -> int | None:
    return graph_storage(unwrapped(tensor)) if tensor.layout is torch.strided else None


def _seen_in(specs: list[AliasSpec | None], results: Tensors, group: list[int], bases: Any) -> list[int]:
    """Note for results of `group` how to see them in one of `bases`; those that are in none."""
    for number, base in bases:
        order = _order(base)
        for i in group:
            if specs[i] is None and order is not None:
                specs[i] = _spec(results[i], base, number, order)
    return [i for i in group if specs[i] is None]


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions of a tensor as they lie in memory, None where it has gaps or overlaps."""
    stride = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: stride[d], reverse=True)
    expected = 1
    for d in reversed(order):
        if tensor.shape[d] != 1:
            if stride[d] != expected:
                return None
            expected = expected * tensor.shape[d]
    return tuple(order)


def _spec(part: torch.Tensor, base: torch.Tensor, number: int, order: tuple[int, ...]) -> AliasSpec | None:
    if part is base:
        return None if part._backward_hooks else AliasSpec(number)
    real = base.is_complex() and not part.is_complex()
    scale = 2 if real else 1
    start = part.storage_offset() - scale * base.storage_offset()
    last = start + sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True))
    inside = part.numel() and start >= 0 and last < scale * base.numel()
    kind = base.dtype.to_real() if real else base.dtype
    bits = part.is_conj() == (base.is_conj() and not real) and part.is_neg() == base.is_neg()
    if not inside or part.dtype != kind or not bits or not _follows(part, base):
        return None
    return AliasSpec(number, tuple(part.shape), part.stride(), start, order, real)


def _follows(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether autograd, at every level, has the one for a view of the other, derivatives and all: not so for
    what was detached, looked at without gradients, has hooks, or came out of an `autograd.Function`. (A dual
    number is a view of its primal.)"""
    if in_forward_mode() and untracked(has_tangent, part) != untracked(has_tangent, whole):
        return False
    while part.requires_grad == whole.requires_grad:
        # `whole` may be a leaf.
        if part.requires_grad and (node_of(part) is None or cut_off(whole) or _own_derivative(part, whole)):
            return False
        wrapped = is_wrapped(part)
        if wrapped != is_wrapped(whole):
            return False
        if not wrapped:
            bases = [t if t._base is None else t._base for t in (part, whole)]
            return bases[0] is bases[1]
        part, whole = unwrap_once(part), unwrap_once(whole)
    return False


def _own_derivative(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether what is pulled back from `part` to what it is a view of passes code of the user's."""
    with functions_as_they_are():
        if part._backward_hooks:
            return True
        node, ends = part.grad_fn, [whole.grad_fn, part.grad_fn if part._base is None else part._base.grad_fn]
        while node is not None and all(node is not end for end in ends):
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return True
            node = node.next_functions[0][0] if node.next_functions else None
    return False


def _made(base: torch.Tensor, spec: AliasSpec) -> torch.Tensor:
    if spec.shape is None:
        return base
    # Batched results may be laid out in another way than the function made them.
    flat = base.permute(spec.order).contiguous()
    flat = (torch.view_as_real(flat) if spec.real else flat).view(-1)
    if math.prod(spec.shape) == flat.shape[0] and spec.stride == _dense(spec.shape):
        return flat.view(spec.shape)
    return _strided(flat, spec)


def _gathered(group: Sequence[tuple[torch.Tensor, AliasSpec]], hidden: HiddenBase) -> torch.Tensor:
    """A base made of the results that are to be seen in it; where none is, it holds whatever."""
    size, count = math.prod(hidden.shape), 0
    if any(spec.real for _, spec in group):
        group = [(t if spec.real else torch.view_as_real(t), _in_reals(spec)) for t, spec in group]
        size *= 2
    first = group[0][0]
    index = torch.zeros(size, dtype=torch.int64, device=first.device)
    for tensor, spec in group:
        places = torch.arange(size, device=first.device).as_strided(spec.shape or (), spec.stride, spec.start)
        index[places.reshape(-1)] = torch.arange(count, count + tensor.numel(), device=first.device)
        count += tensor.numel()
    flat = torch.cat([tensor.reshape(-1) for tensor, _ in group])[index]
    if any(spec.real for _, spec in group):
        flat = torch.view_as_complex(flat.view(-1, 2))
    lying = flat.view([hidden.shape[d] for d in hidden.order])
    return lying.permute([hidden.order.index(d) for d in range(len(hidden.shape))])


def _in_reals(spec: AliasSpec) -> AliasSpec:
    """A spec in the parts of its complex base, each number a pair."""
    if spec.real:
        return spec
    stride = (*[2 * s for s in spec.stride], 1)
    return spec._replace(shape=(*(spec.shape or ()), 2), stride=stride, start=2 * spec.start, real=True)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([math.prod(shape[d + 1 :]) for d in range(len(shape))])


def _strided(flat: torch.Tensor, spec: AliasSpec) -> torch.Tensor:
    """`flat.as_strided(...)` by views that compilers can write through, where there are such."""
    shape, stride = spec.shape or (), spec.stride
    axes = [d for d in range(len(shape)) if shape[d] != 1 and stride[d] != 0]
    axes.sort(key=lambda d: stride[d], reverse=True)
    view, at = flat, spec.start
    for k, d in enumerate(axes):
        count, step = shape[d], stride[d]
        if d == axes[-1]:
            view = view.narrow(-1, at, (count - 1) * step + 1)
            view = view if step == 1 else view[..., ::step]
            break
        # Rows of `step` elements, of which the view has a part, `span`. The last row may be too short: then
        # all begin earlier.
        span = 1 + sum((shape[e] - 1) * stride[e] for e in axes[k + 1 :])
        early = max(0, at + count * step - view.shape[-1])
        if early > at or early + span > step:
            return flat.as_strided(shape, stride, flat.storage_offset() + spec.start)
        view = view.narrow(-1, at - early, count * step).view(*view.shape[:-1], count, step)
        at = early
    if not axes:
        view = view.narrow(0, at, 1).view(())
    view = view.permute([axes.index(d) for d in sorted(axes)])
    for d in range(len(shape)):
        if d not in axes:
            view = view.unsqueeze(d)
    return view.expand(shape)
