"""Naming a value, so that a compiler's graph keeps the name."""

from __future__ import annotations

import torch

from remat.transforms.compat import unwrapped
from remat.transforms.context import recordings
from remat.transforms.sharded import local_tensors

# Composite: below autograd and functorch only the alias is left, which has all their rules.
_library = torch.library.Library("remat", "FRAGMENT")
_library.define("checkpoint_name(Tensor(a) value, str name) -> Tensor(a)")
# Signposts in Dynamo's graphs: what a region hands out because `capture` wants it, and what `capture_grads`
# differentiates by.
_library.define("captured(Tensor(a) value, str name) -> Tensor(a)")
_library.define("variable(Tensor(a) value) -> Tensor(a)")


def give_name(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`named` outside of Dynamo."""
    # An op of its own: the value that is named may be one of several results of the op that made it.
    alias = tensor.view_as(tensor)
    for mode in recordings():
        for part in local_tensors([unwrapped(alias)]):
            mode.name(part, name)
    return alias


def _alias(tensor: torch.Tensor, *_: str) -> torch.Tensor:
    return tensor.view_as(tensor)


for _op, _kernel in (("checkpoint_name", give_name), ("captured", _alias), ("variable", _alias)):
    _library.impl(_op, _kernel, "CompositeImplicitAutograd")
    # torch.vmap does not take the composite for a rule of its own.
    _library.impl(_op, _kernel, "FuncTorchBatchedDecomposition")
NAMED = torch.ops.remat.checkpoint_name.default
CAPTURED = torch.ops.remat.captured.default
VARIABLE = torch.ops.remat.variable.default


def named(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """An alias of `tensor` that every recording in progress knows by `name`."""
    if torch.compiler.is_dynamo_compiling():
        # Nothing is recorded yet: the op stands in the graph until it is traced.
        return NAMED(tensor, name)
    return give_name(tensor, name)
