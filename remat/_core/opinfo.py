"""What a policy is shown of an op, and what it may answer."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.transforms import RematError, map_only, metadata


class Decision(enum.Enum):
    """What becomes of an op's outputs between forward and backward.

    Example:
        >>> from remat import Decision
        >>> Decision.SAVE | Decision.RECOMPUTE
        <Decision.SAVE: 2>
    """

    RECOMPUTE = 0
    OFFLOAD = 1
    SAVE = 2

    def __or__(self, other: Decision) -> Decision:
        return max(self, other, key=lambda d: d.value)

    def __and__(self, other: Decision) -> Decision:
        return min(self, other, key=lambda d: d.value)


@dataclass(frozen=True)
class TensorMeta:
    """A tensor without its data; sizes are asked for as a tensor's are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of a dense tensor of this shape."""
        return self.numel() * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        shape, stride, dtype, device = metadata(tensor)
        return cls(tuple(shape), dtype, device, tuple(stride or ()))


@dataclass(frozen=True)
class Call:
    """The torch function the user called, above functorch: its sizes are per example under vmap.

    `function` is what a `TorchFunctionMode` sees (`torch.nn.functional.linear`, `torch.matmul`,
    `torch.Tensor.__matmul__`, ...), `args` and `kwargs` hold `TensorMeta` in place of tensors.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class OpInfo:
    """One op of a region, as a policy sees it: metadata only, never data.

    Attributes:
        op: the aten (or custom) overload, below functorch: under `vmap` it is the batched op.
        args, kwargs, outputs: the op's operands and results, tensors replaced by `TensorMeta`.
        name: the `checkpoint_name` of the value, or None.
        index: position of the op in the region, from 0.
        region: the region's name.
        call: the torch function the user wrote, with sizes per example, or None where not known.
        module: the path of the `nn.Module` that runs the op, "" for none. Only for policies that ask for it:
            a rule does by `checkpoint_policy(rule, modules=True)`, a class by `needs_modules = True`.

    Example:
        >>> import torch
        >>> from remat import checkpoint_policy, remat
        >>> @checkpoint_policy
        ... def told(info):
        ...     print(info.op, info.outputs[0].shape, info.bytes, info.flops)
        ...     return False
        >>> layer = remat(lambda w, x: torch.tanh(x @ w), policy=told)
        >>> y = layer(torch.ones(4, 4, requires_grad=True), torch.ones(2, 4))
        aten.mm.default (2, 4) 32 64
        aten.tanh.default (2, 4) 32 0
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]
    name: str | None = None
    index: int = 0
    region: str = ""
    call: Call | None = field(default=None, repr=False)
    _module: str | None = field(default=None, repr=False)

    @property
    def module(self) -> str:
        """The path of the module that runs the op, from the outermost module around it that holds it.

        If the op reads a matrix of the module's own that is not called `weight`, the path ends with its name:
        `layers.0.mlp.experts.down_proj`.

        Raises:
            RematError: the policy does not ask for modules.
        """
        if self._module is None:
            raise RematError(
                "info.module is for policies that ask for it, as to find it takes a while: write "
                "checkpoint_policy(rule, modules=True), or needs_modules = True in a class of policies."
            )
        return self._module

    @property
    def bytes(self) -> int:
        """Bytes of the outputs."""
        return sum(o.bytes for o in self.outputs if isinstance(o, TensorMeta))

    @property
    def flops(self) -> int:
        """Floating point operations of the op: torch's formulas, those of `remat.register_op`, and the
        standard counts of factorizations, solves, FFTs and recurrent layers.

        0 for ops that have none, which are pointwise ops, reductions and views.
        """
        from remat._core.flops import known_flops

        found = known_flops(
            self.op, self.args, self.kwargs, self.outputs, lambda x: isinstance(x, TensorMeta)
        )
        return found or 0


def describe(tree: Any) -> Any:
    """`tree` with every tensor replaced by its `TensorMeta`."""
    return map_only(torch.Tensor, TensorMeta.of, tree)
