"""Scans, loops of unknown length, and stacked layers."""

from remat._scan.associative import associative_scan_remat  # all prefixes under an associative function
from remat._scan.scan import (
    scan_remat,  # fold `body` over the leading axis of `xs`, keeping few carries for the backward
)
from remat._scan.stacked_layers import (
    scan_layers,  # identical blocks with stacked parameters as one scan
    stack_params,  # parameters and buffers of identical modules, stacked along a new first axis
    unstack_params,  # one state dict a layer from stacked parameters
)
from remat._scan.tiles import (
    Tiled,  # what a tiled function is, without the checks of its options
    check_tiles,  # a number of tiles as a user writes it
    tiled,  # a function that acts token by token, one tile of tokens at a time
)
from remat._scan.while_loop import while_remat  # a differentiable loop of unknown length
