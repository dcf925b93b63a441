"""Calls that a joint graph leaves out: what goes in and what comes out of them is there, their ops are not.

A planner that knows the regions of a model by themselves records the model around them: so the layers of a
deep model are traced once, and not once more as parts of the whole.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from remat.transforms.compat import outside_all_modes
from remat.transforms.context import of_a_look
from remat.transforms.joint.ops import Hole
from remat.transforms.joint.stand_ins import on_fakes
from remat.transforms.objects import is_tensor
from remat.transforms.pytree import flatten, tree_leaves, unflatten

# The recorder of the graph that is being made, for those who leave calls out of it.
around: ContextVar[Any] = ContextVar("remat_around", default=None)


@dataclass(frozen=True)
class Shell:
    """What a call returns, without data.

    Attributes:
        spec: of the results as a tree.
        leaves: for each the number of the tensor among the arguments that it is, or its metadata and whether
            it has a gradient, or the thing itself in a tuple.
    """

    spec: Any
    leaves: tuple[Any, ...]


@dataclass(frozen=True)
class _Meta:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool


def shell_of(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, hooks: bool = True) -> Shell:
    """What `fn(*args, **kwargs)` returns, by a run on fake tensors that no mode around sees.

    Without `hooks` none are set on saved tensors: torch.func inside `fn` refuses them.
    """
    given = {id(t): k for k, t in enumerate(tensors_given(args, kwargs))}
    # What it saves is nothing to those who record around. An op's own result would hold on to the op that
    # holds it: a cycle that nothing collects.
    dropping = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), of_a_look(lambda t: t))
    with outside_all_modes(), dropping if hooks else contextlib.nullcontext():
        leaves, spec = flatten(on_fakes(fn, args, kwargs))

    def noted(leaf: Any) -> Any:
        if not is_tensor(leaf):
            return (leaf,)
        known = given.get(id(leaf))
        made = _Meta(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
        return made if known is None else known

    return Shell(spec, tuple(map(noted, leaves)))


def left_out(shell: Shell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of a call that is left out of the graph around."""
    given = tensors_given(args, kwargs)
    fresh = [leaf for leaf in shell.leaves if isinstance(leaf, _Meta)]
    hole = Opened(around.get(), given)
    # Parameters inside give the results a gradient, too.
    anchor = torch.empty(0, requires_grad=any(leaf.grad for leaf in fresh))
    hole.begin(anchor)
    made = iter(_Left.apply(hole, fresh, anchor, *[t for t in given if t.requires_grad]) if fresh else ())
    leaves = [
        given[leaf] if isinstance(leaf, int) else next(made) if isinstance(leaf, _Meta) else leaf[0]
        for leaf in shell.leaves
    ]
    return unflatten(leaves, shell.spec)


def tensors_given(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among arguments, each once."""
    return list({id(t): t for t in tree_leaves((args, kwargs)) if is_tensor(t)}.values())


class Opened:
    """A hole while the graph around is recorded; `recorder` is None where there is none."""

    def __init__(self, recorder: Any, given: list[torch.Tensor]) -> None:
        self.recorder, self.given, self.at = recorder, given, -1

    def begin(self, anchor: torch.Tensor) -> None:
        if self.recorder is not None:
            self.at = len(self.recorder.holes)
            operands = tuple([self.recorder.number(t) for t in self.given])
            self.recorder.holes.append([len(self.recorder.ops), -1, operands, ()])
            if anchor.requires_grad:
                # The backward is to come here, whatever else has a gradient.
                self.recorder.captured[id(anchor)] = anchor

    def come_back(self, cotangents: tuple[Any, ...]) -> None:
        if self.recorder is not None:
            hole = self.recorder.holes[self.at]
            hole[3] = tuple([self.recorder.number(t) for t in cotangents if t is not None])
            hole[1] = len(self.recorder.ops)


def holes_of(recorder: Any) -> tuple[Hole, ...]:
    """What was left out."""
    return tuple(Hole(*hole) for hole in recorder.holes)


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hole: Opened, fresh: list[_Meta], anchor: torch.Tensor, *operands: torch.Tensor
    ) -> Any:
        made = [torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device=m.device) for m in fresh]
        ctx.mark_non_differentiable(*[t for t, m in zip(made, fresh, strict=True) if not m.grad])
        ctx.set_materialize_grads(False)
        ctx.hole = hole
        ctx.like = [(t.shape, t.stride(), t.dtype, t.device) for t in operands]
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        ctx.hole.come_back(cotangents)
        found = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device) if wanted else None
            for (shape, stride, dtype, device), wanted in zip(ctx.like, ctx.needs_input_grad[3:], strict=True)
        ]
        return (None, None, None, *found)
