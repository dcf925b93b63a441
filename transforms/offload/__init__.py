"""Kept values in host memory."""

from remat.transforms.offload.transfer import (
    INPUT,  # the name of a region's arguments that belong on the host
    Copy,  # a copy that is on its way
    Elsewhere,  # a kept value that is not on its device
    Store,  # what one forward of a region sent away
    away_in,  # the values among what is kept of an op that lie in host memory
    copied_to_host,  # a copy in host memory, made where the device computes
    held_tensors,  # the tensors held for a kept value, and which are offloaded
    lane,  # how a tensor travels to the host, or from there
    pinned_for,  # whether such a tensor goes to pinned memory
    send,  # send a value to the host, unless what is kept of the op that made its memory, `root`, covers it
    to_device,  # begin to copy a tensor that was sent back
    to_host,  # begin to copy a tensor to host memory
)
