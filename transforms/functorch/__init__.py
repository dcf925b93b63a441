"""Regions under functorch levels and in traced graphs: a primitive with rules for grad, vmap and jvp."""

from remat.transforms.functorch import nodes, rules  # noqa: F401  (they add the rules that `call` looks up)
from remat.transforms.functorch.aliasing import (
    Aliasing,  # which results of a region leave its node, and how the others are made of those
)
from remat.transforms.functorch.primitive import (
    Family,  # what all primitives derived from one call of a region share
    Prim,  # a function of tensors to a tuple of tensors, ready to be called under any levels
    PullBack,  # (operands, cotangents of the outs at `present`) -> gradients of the operands at `mask`
    World,  # where primitives run that do not run in eager
    call,  # run `prim` under whatever functorch levels are active
    replaying,  # hand out a forward's values (`replay` is a mode, or None) until the backward begins
)
