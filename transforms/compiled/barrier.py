"""An optimization barrier: the identity on a value, ordered after other values.

A recomputation that is written out in a graph repeats the forward op by op. Compilers undo that:
common-subexpression elimination merges the two, and schedulers fuse or interleave them. A recomputation
that starts from `fence(x, cotangents)` has other inputs than the forward, and cannot start before the
backward has reached it. (JAX puts its `optimization_barrier` in the same place, `jax._src.ad_checkpoint`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from remat.transforms.compat import graph_storage, in_transform, must_save
from remat.transforms.ops import Traits
from remat.transforms.tape import tensors_in

_library = torch.library.Library("remat", "FRAGMENT")
_library.define("fence(Tensor value, Tensor[] after) -> Tensor")
_library.define("snapshot(Tensor value) -> Tensor")


def _copy(value: torch.Tensor, after: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    copy = value.clone()
    if copy.stride() == value.stride():
        return copy
    # Expanded, or with gaps: the strides that were promised are those of a copy of the memory it spans.
    last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    span = value.as_strided((last + 1,), (1,)) if value.numel() else value.flatten()
    return span.clone().as_strided(value.shape, value.stride())


def _like(value: torch.Tensor, after: Sequence[torch.Tensor]) -> torch.Tensor:
    # By its schema the op makes a new tensor, so functionalization tells the two apart; by its memory it is
    # the same, so that no later pass writes into what it takes for a buffer of its own.
    return value.view_as(value)


_library.impl("fence", _copy, "CompositeExplicitAutograd")
torch.library.register_fake("remat::fence", _like, lib=_library)
_library.impl("snapshot", _copy, "CompositeExplicitAutograd")
torch.library.register_fake("remat::snapshot", _copy, lib=_library)


def snapshot(value: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that is about to be written to. Of a plain one compilers find that it does nothing,
    and hand what is in the memory later to the backward."""
    copy = torch.ops.remat.snapshot.default(value)
    must_save(copy)
    return copy


def fence(value: torch.Tensor, after: Sequence[torch.Tensor]) -> torch.Tensor:
    """`value`, as a compiler must compute with it: after `after`, and never for what it was before.

    The identity for derivatives of every order and kind, which go to `value` alone.

    Args:
        value: a tensor of any shape and dtype.
        after: tensors that have to be there first; with none of them the result is `value` itself.
    """
    if after and (torch.is_grad_enabled() or in_transform()):
        return _Fence.apply(value, *after)
    return fence_below(value, after)


def fence_below(value: torch.Tensor, after: Sequence[torch.Tensor]) -> torch.Tensor:
    """`fence` in a dispatch mode, where autograd and functorch have been: it leaves no node of its own."""
    return torch.ops.remat.fence.default(value, list(after)) if after else value


class _Fence(torch.autograd.Function):
    """The rules: torch's custom ops have none for torch.func."""

    generate_vmap_rule = False

    @staticmethod
    def forward(value: torch.Tensor, *after: torch.Tensor) -> torch.Tensor:
        return torch.ops.remat.fence.default(value, list(after))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.count = len(inputs) - 1
        if not output.is_floating_point() and not output.is_complex():
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        return cotangent, *[None] * ctx.count

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return None if tangent is None else tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, dims: Any, value: torch.Tensor, *after: torch.Tensor) -> Any:
        # The order holds whatever the batch dimensions of `after` are.
        return fence(value, after), dims[0]


# -- where it stands ----------------------------------------------------------------------------------
# A fence costs a node of every graph that a compiler makes of a region, and most operands are weights, which
# ops only join with something that is behind a fence already.
_aten = torch.ops.aten

# Ops that are linear in all but one operand, at this position. What decompositions make of them computes
# nothing from the others alone, nor do their derivatives, which join them with a cotangent.
_LINEAR_BESIDE = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten.convolution.default: 0,
    _aten.native_layer_norm.default: 0,
    _aten.native_group_norm.default: 0,
    _aten.add.Tensor: 0,
    _aten.sub.Tensor: 0,
    _aten.mul.Tensor: 0,
}


class Origins:
    """Follows a region's ops in a trace, and what they compute from.

    Args:
        operands: the region's, each by its position.
    """

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        self.count = len(operands)
        self.given: dict[int, list[int]] = {}  # storage -> positions
        for i, operand in enumerate(operands):
            self.given.setdefault(graph_storage(operand), []).append(i)
        self.fenced: set[int] = set()
        # Storages of results that cannot be computed without a fenced operand.
        self.behind: set[int] = set()

    def bare(self, position: int) -> bool:
        """Whether nothing is computed from this operand but together with a fenced one."""
        return position < self.count and position not in self.fenced

    def follow(self, func: Any, facts: Traits, args: Any, kwargs: Any, out: Any) -> None:
        """Take note of an op that ran."""
        read = [graph_storage(t) for t in tensors_in((*args, *kwargs.values()))]
        if facts.view and read and read[0] in self.given:
            return
        starts = read
        at = _LINEAR_BESIDE.get(func)
        if at is not None and isinstance(args[at], torch.Tensor):
            main = graph_storage(args[at])
            if main in self.given or main in self.behind:
                starts = [main]
        self.fenced.update(i for s in starts for i in self.given.get(s, ()))
        made = {graph_storage(t) for t in tensors_in(out)}
        # Addresses come again once a result is gone, so the others are taken out.
        self.behind = self.behind | made if any(map(self._behind, read)) else self.behind - made

    def _behind(self, storage: int) -> bool:
        return storage in self.behind or any(i in self.fenced for i in self.given.get(storage, ()))
