"""Regions written out in a compiler's graph."""

from remat.transforms.compiled.barrier import (
    CAPTURED,  # the op that marks a value as an operand
    NAMED,  # the op that carries a name through a graph
    ONCE,  # the op of a value that is computed once in a graph
    VARIABLE,  # the op that marks what is differentiated by
    give_name,  # `named` outside of Dynamo
    named,  # an alias of `tensor` that every recording in progress knows by `name`
)
from remat.transforms.compiled.lowering import (
    CONSTANT_SHARE,  # what constants may take, as a share of the largest operand
    DEAR,  # ops that cost more than to read what they made
    PRODUCTS,  # products of matrices
    RECOMPUTED,  # the key under which a graph's nodes say which call of a region they recompute
    GraphLowering,  # runs primitives at the bottom of the functorch levels (a `functorch.primitive.World`)
    before_products,  # let a wide activation be recomputed before its own gradient is
    constant_key,  # what values that depend on nothing have in common if they are the same
    is_view,  # whether a node is another look at its operand's memory
)
from remat.transforms.compiled.record import (
    GraphDedup,  # one call of a region
    dedup_key,  # what two calls of regions have in common if they differ in their tensors only
)
