"""Kept values in host memory."""

from remat.transforms.offload.transfer import Away, Elsewhere, Store, away_in, send, travelling

__all__ = [
    "Away",  # a kept value that lies in host memory
    "Elsewhere",  # a kept value that is not on its device
    "Store",  # what one forward of a region sent away
    "away_in",  # the values among what is kept of an op that lie in host memory
    "send",  # send a value to the host, unless what is kept of the op that made its memory, `root`, covers it
    "travelling",  # where what runs now brings a value, "host" or "device"
]
