"""What a call of `remat(fn)` is to the engine, and what earlier calls taught."""

from remat.transforms.context import (
    choosing,
    is_recomputing,
    labelled,
    planning,
    recomputed_region,
    recomputing,
    selecting,
)
from remat.transforms.region.cache import Bounded, CachedTrace, forget_all
from remat.transforms.region.region import Region, checksum

__all__ = [
    "Bounded",  # a table of so many entries at most
    "CachedTrace",  # a settled forward that later ones are held against
    "forget_all",  # drop every cached trace
    "checksum",  # a number for every tensor of a result that changes with any bit of it
    "Region",  # a function to be rematerialized, with everything that does not depend on the arguments
    "choosing",  # around a function that a policy lets run as it is
    "is_recomputing",  # whether the code that asks runs as part of a recomputation
    "labelled",  # a label for the profiler's trace, such as `remat::recompute block`, if a profiler is on
    "planning",  # run the region `name` for what it would do
    "recomputed_region",  # the name of the region that this thread is running again
    "recomputing",  # begin to run the region `name` again on this thread
    "selecting",  # whether the innermost region around here has a policy
]
