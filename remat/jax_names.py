"""JAX's names for what this library does: the public path to `remat.interop.jax`."""

from remat.interop.jax import (
    OffloadDotWithNoBatchDims as OffloadDotWithNoBatchDims,
    PortingError as PortingError,
    SaveAndOffloadOnlyTheseNames as SaveAndOffloadOnlyTheseNames,
    SaveAnyNamesButThese as SaveAnyNamesButThese,
    SaveAnythingExceptTheseNames as SaveAnythingExceptTheseNames,
    SaveFromBothPolicies as SaveFromBothPolicies,
    SaveOnlyTheseNames as SaveOnlyTheseNames,
    ad_checkpoint as ad_checkpoint,
    checkpoint as checkpoint,
    checkpoint as remat,
    checkpoint_name as checkpoint_name,
    checkpoint_policies as checkpoint_policies,
    print_saved_residuals as print_saved_residuals,
    saved_residuals as saved_residuals,
)

__all__ = [
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "print_saved_residuals",
    "remat",
    "saved_residuals",
]
