"""What a function closes over, found, named and made an operand."""

from remat.transforms.closure.bindings import (
    CONTENTS,  # the descriptor by which a cell is read and written
    Bindings,  # which tensors are where in reach, so that a recomputation sees them again
    Noted,  # what was held where, to be put back
    PythonState,  # all that objects in reach hold, so that a second run of a function leaves nothing
    captured,  # the tensors among what functions lead to that could carry a derivative or a batch dimension
    hold,  # put values where holders have their keys, none where that is MISSING
    names_in,  # what code names: globals and attributes, in functions inside it too
    parts_of,  # the modules among what functions lead to, and those in them
    reached,  # everything that functions, modules and containers lead to
    standing_in,  # a function with other tensors in the place of those it captures
)
from remat.transforms.closure.convert import (
    MOST_TRIES,  # how often a region starts over with one more captured tensor among its operands
    ClosureConversion,  # puts operands in the place of captured tensors, refuses other captured ones
    Missed,  # a captured tensor that the search had not found
    StrayWatch,  # notes the tensors that ops meet and did not make
    as_operand,  # what the enclosing region, if any, has put in the place of `tensor`
    as_operands,  # `tree` with what the enclosing region has put in the place of its tensors
    innermost,  # the substitution in force on this thread
    known_around,  # whether a region or a scan around has a captured tensor, too
    made_inside,  # tell every substitution in force that these were made inside its region
    read_again,  # what to raise when a recomputation meets a captured tensor that the forward did not
    refuse_strays,  # raise where ops met a tensor whose derivative would be lost
    swapping,  # whether a region around here reads its captured tensors as operands
    trial,  # within, a function is tried on fake tensors
)
from remat.transforms.closure.paths import (
    by_storage,  # block of memory -> what the user calls it
    of_arguments,  # position among the leaves of (args, kwargs) -> path
    of_captured,  # the path of a tensor that `fn` closes over, None if it is not found
)
from remat.transforms.closure.stored import (
    Stored,  # what one call of a region stores where it does not return it
    anew,  # tensors in reach beside known ones, if they carry a derivative or a batch
    broken_off,  # have what a function leaves in an exception, or has stored until then, refuse derivatives
    made_for,  # the tensors that results that are no pytrees hold
    places_of,  # where a function, or what it leads to, holds tensors, given their ids
    refuse_derivatives,  # have tensors that a function has stored refuse derivatives
    refuse_given,  # raise where a function has stored a result in a container that it was given
    results_of,  # results that are no pytrees and may hold tensors
    stored_first,  # what a first run of a region has stored, as further results
)
