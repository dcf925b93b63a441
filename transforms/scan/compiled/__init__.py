"""A scan's blocks of steps, compiled."""

from remat.transforms.scan.compiled.unroll import (
    MOST,  # blocks whose rows are looked up at a time
    UnrolledStep,  # a scan's step, unrolled and compiled
    dense,  # alike in every block
)
