"""Whether ranks agree on what regions keep: what an engine that knows nothing of groups calls."""

from remat._ranks.agreement import (
    wrong_anywhere,  # what is wrong on any of some ranks
)
from remat._ranks.wrapped import (
    RANKS,  # what a region calls to have what it keeps compared
)
