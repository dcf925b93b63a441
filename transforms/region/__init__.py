"""What a call of `remat(fn)` is to the engine, and what earlier calls taught."""

from remat.transforms.context import (
    choosing,  # around a function that a policy lets run as it is
    is_recomputing,  # whether the code that asks runs as part of a recomputation
    planning,  # run the region `name` for what it would do
    recomputed_region,  # the name of the region that this thread is running again
    recomputing,  # begin to run the region `name` again on this thread
    run_again_whole,  # have the regions around run their functions again, not ops from the tape
    selecting,  # whether the innermost region around here has a policy
)
from remat.transforms.region.cache import (
    CachedTrace,  # a settled forward that later ones are held against
    forget_all,  # drop every cached trace
)
from remat.transforms.region.region import (
    Region,  # a function to be rematerialized, with everything that does not depend on the arguments
    checksum,  # a number for every tensor of a result that changes with any bit of it
)
