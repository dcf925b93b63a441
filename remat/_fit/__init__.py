"""`remat.fit`: a model made to fit a peak, in one call."""

from remat._fit.fitting import (
    Fit,  # what `fit` did
    fit,  # make a model's step fit a peak
)
from remat._fit.held import (
    HeldBytes,  # bytes that live throughout a step, by what they are
    held_by,  # those of a model
)
