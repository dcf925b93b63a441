"""What a function keeps, listed and logged."""

from remat._inspect.logging import logger, told, wanted
from remat._inspect.looking import looked_at
from remat._inspect.residuals import Residual, print_saved_residuals, saved_residuals

__all__ = [
    "Residual",  # one tensor that is kept, with its place in the user's code
    "logger",  # Python's logger of that name; users set its level
    "looked_at",  # leave all that functions and arguments can reach as it is, tensors included
    "told",  # `call()`, which runs the forward of region `name`, and a message of what that kept, if anything
    "wanted",  # whether a region that runs forward now should tell what it keeps
    "print_saved_residuals",  # print what `saved_residuals` finds, a line each, and the total
    "saved_residuals",  # what would be kept if `fn(*args, **kwargs)` were differentiated
]
