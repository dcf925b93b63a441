"""Regions under functorch levels: a primitive with rules for grad, vmap and jvp."""

from remat.transforms.functorch.aliasing import Look, leaving, looks, seen
from remat.transforms.functorch.primitive import Family, Prim, PullBack, call, replaying

__all__ = [
    "Look",  # a view of another result
    "leaving",  # those results that leave the node
    "looks",  # for every result, how to see it in another one that holds all of it
    "seen",  # all results, given those that left the node
    "Family",  # what all primitives derived from one call of a region share
    "Prim",  # a function of tensors to a tuple of tensors, ready to be called under any levels
    "PullBack",  # (operands, cotangents of the outs at `present`) -> gradients of the operands at `mask`
    "call",  # run `prim` under whatever functorch levels are active
    "replaying",  # hand out a forward's values (`replay` is a mode, or None) until the backward begins
]
