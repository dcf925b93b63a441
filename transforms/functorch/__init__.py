"""Regions under functorch levels and in traced graphs: a primitive with rules for grad, vmap and jvp."""

from remat.transforms.functorch import nodes, rules  # noqa: F401  (they add the rules that `call` looks up)
from remat.transforms.functorch.aliasing import Aliasing
from remat.transforms.functorch.flat_call import FlatCall, WatchingRefused
from remat.transforms.functorch.primitive import Family, Prim, PullBack, World, call, replaying

__all__ = [
    "Aliasing",  # which results of a region leave its node, and how the others are made of those
    "FlatCall",  # a region's call with every tensor it depends on as a flat operand
    "WatchingRefused",  # the forward must be run afresh, without watching
    "Family",  # what all primitives derived from one call of a region share
    "Prim",  # a function of tensors to a tuple of tensors, ready to be called under any levels
    "World",  # where primitives run that do not run in eager
    "PullBack",  # (operands, cotangents of the outs at `present`) -> gradients of the operands at `mask`
    "call",  # run `prim` under whatever functorch levels are active
    "replaying",  # hand out a forward's values (`replay` is a mode, or None) until the backward begins
]
