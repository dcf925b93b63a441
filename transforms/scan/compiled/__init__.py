"""A scan's blocks of steps, compiled."""

from remat.transforms.scan.compiled.sums import Sums
from remat.transforms.scan.compiled.unroll import MOST, UnrolledStep, dense, owner

__all__ = [
    "Sums",  # the sums of the consts' gradients
    "UnrolledStep",  # a scan's step, unrolled and compiled
    "MOST",  # blocks whose rows are looked up at a time
    "dense",  # alike in every block
    "owner",  # where to put what must live as long as the steps that are being compiled now, if any are
]
