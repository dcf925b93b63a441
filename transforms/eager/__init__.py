"""Regions under plain autograd: a frame of saved-tensor hooks around the function."""

from remat.transforms.eager.frame import Frame
from remat.transforms.eager.inputs import Inputs
from remat.transforms.eager.rerun import stop_enclosing
from remat.transforms.eager.saved import enclosed, unread, watcher

__all__ = [
    "Frame",  # one forward of a region, and what it takes to make again what its backward reads
    "Inputs",  # the arguments of one call, and the state around it
    "enclosed",  # whether the saved-tensor hooks in force are those of a region
    "stop_enclosing",  # end the run of an enclosing region's function, where it has all it needs
    "unread",  # the second of two hooks that only watch what is saved
    "watcher",  # whom to tell what a region reads without being given it
]
