"""Kept values in host memory."""

from remat.transforms.offload.prefetch import Store
from remat.transforms.offload.transfer import (
    Away,
    Copy,
    Elsewhere,
    away_in,
    lane,
    pinned_for,
    send,
    to_device,
    to_host,
    travelling,
)

__all__ = [
    "Away",  # a kept value that lies in host memory
    "Copy",  # a copy that is on its way
    "Elsewhere",  # a kept value that is not on its device
    "Store",  # what one forward of a region sent away
    "away_in",  # the values among what is kept of an op that lie in host memory
    "lane",  # how a tensor travels to the host, or from there
    "pinned_for",  # whether such a tensor goes to pinned memory
    "send",  # send a value to the host, unless what is kept of the op that made its memory, `root`, covers it
    "to_device",  # begin to copy a tensor that was sent back
    "to_host",  # begin to copy a tensor to host memory
    "travelling",  # where what runs now brings a value, "host" or "device"
]
