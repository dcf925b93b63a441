"""JAX's names for what this library does: the public path to `remat.interop.jax`."""

from remat.interop.jax import OffloadDotWithNoBatchDims as OffloadDotWithNoBatchDims
from remat.interop.jax import PortingError as PortingError
from remat.interop.jax import SaveAndOffloadOnlyTheseNames as SaveAndOffloadOnlyTheseNames
from remat.interop.jax import SaveAnyNamesButThese as SaveAnyNamesButThese
from remat.interop.jax import SaveAnythingExceptTheseNames as SaveAnythingExceptTheseNames
from remat.interop.jax import SaveFromBothPolicies as SaveFromBothPolicies
from remat.interop.jax import SaveOnlyTheseNames as SaveOnlyTheseNames
from remat.interop.jax import ad_checkpoint as ad_checkpoint
from remat.interop.jax import checkpoint as checkpoint
from remat.interop.jax import checkpoint as remat
from remat.interop.jax import checkpoint_name as checkpoint_name
from remat.interop.jax import checkpoint_policies as checkpoint_policies
from remat.interop.jax import print_saved_residuals as print_saved_residuals
from remat.interop.jax import saved_residuals as saved_residuals

__all__ = [
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "print_saved_residuals",
    "remat",
    "saved_residuals",
]
