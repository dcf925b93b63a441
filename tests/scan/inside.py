"""What tests of scans read of the library's inside, each with its reason."""

from remat._scan.while_loop import default_slots  # carries that a loop keeps where nobody says
from remat.transforms.compat import is_batched  # whether a step sees a batch of vmap's
from remat.transforms.offload import to_host  # copies to the host are counted
from remat.transforms.scan import spec  # where a scan sends carries to the host
from remat.transforms.scan.compiled.unroll import UnrolledStep  # graphs of blocks of steps, before they run
from remat.transforms.scan.instructions import Advance, Restore, Reverse, Store, with_notice  # of a schedule
from remat.transforms.scan.traced import entry  # scans in graphs; how many steps are a block
from remat.transforms.state import fingerprints_of  # what says whether a step gave the same numbers

__all__ = [
    "Advance", "Restore", "Reverse", "Store", "UnrolledStep", "default_slots", "entry",
    "is_batched", "fingerprints_of", "spec", "to_host", "with_notice",
]  # fmt: skip
