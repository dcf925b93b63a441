"""What a function keeps, listed and logged."""

from remat._inspect.logging import (
    logger,  # Python's logger of that name; users set its level
    told,  # `call()`, which runs the forward of region `name`, and a message of what that kept, if anything
    wanted,  # whether a region that runs forward now should tell what it keeps
)
from remat._inspect.looking import (
    looked_at,  # leave all that functions and arguments can reach as it is, tensors included
)
from remat._inspect.residuals import (
    Residual,  # one tensor that is kept, with its place in the user's code
    print_saved_residuals,  # print what `saved_residuals` finds, a line each, and the total
    saved_residuals,  # what would be kept if `fn(*args, **kwargs)` were differentiated
)
