"""Named values on their way out of regions, and offsets on their way in."""

from remat.transforms.intermediates.taps import (
    Handed,  # the open sessions of a graph, as a region of that graph can serve them
    Mirrors,  # the open sessions as a region below their levels can serve them
    Perturbations,  # the same with offsets that it makes when it meets a tensor
    Refusal,  # stands where values can neither leave nor enter
    Values,  # collects named values
    again,  # the sessions of a recomputation
    current,  # the open sessions, outermost first, but for those that a running backward does not concern
    marks,  # where the open sessions stand, for a recomputation of what runs next
    only,  # let these be the open sessions for a while
    opened,  # add a session
    tap,  # give a named tree to the open sessions
)
