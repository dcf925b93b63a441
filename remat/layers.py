"""Identical layers with stacked parameters, run as one scan."""

from remat._scan import scan_layers as scan_layers
from remat._scan import stack_params as stack_params
from remat._scan import unstack_params as unstack_params

__all__ = ["scan_layers", "stack_params", "unstack_params"]
