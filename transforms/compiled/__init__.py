"""Regions written out in a compiler's graph."""

from remat.transforms.compiled.barrier import (
    CAPTURED,
    NAMED,
    ONCE,
    VARIABLE,
    GraphDedup,
    dedup_key,
    give_name,
    named,
)
from remat.transforms.compiled.lowering import (
    CONSTANT_SHARE,
    DEAR,
    PRODUCTS,
    RECOMPUTED,
    GraphLowering,
    before_products,
    constant_key,
    is_view,
)
