"""What a call of `remat(fn)` is to the engine, and what earlier calls taught."""

from remat.transforms.region.cache import Plan, forget_all, memory_of, reach, repeats
from remat.transforms.region.region import (
    Region,
    choosing,
    is_recomputing,
    labelled,
    planning,
    recomputed_region,
    recomputing,
    selecting,
)

__all__ = [
    "Plan",  # what a trace teaches of the next call with the same signature
    "forget_all",  # drop every plan
    "memory_of",  # the memory that all regions around one function share, for as long as `anchor` lives
    "reach",  # positions of outside tensors that the recomputation reads
    "repeats",  # whether another run of the same ops would be treated the same
    "Region",  # a function to be rematerialized, with everything that does not depend on the arguments
    "choosing",  # around a function that a policy lets run as it is
    "is_recomputing",  # whether the code that asks runs as part of a recomputation
    "labelled",  # a label for the profiler's trace, such as `remat::recompute block`, if a profiler is on
    "planning",  # run the region `name` for what it would do
    "recomputed_region",  # the name of the region that this thread is running again
    "recomputing",  # begin to run the region `name` again on this thread
    "selecting",  # whether the innermost region around here has a policy
]
