"""Regions under plain autograd: one frame a call, from its forward to its backward."""

from remat.transforms.eager.frame import Plain, enclosed, stop_enclosing
from remat.transforms.eager.guarded import Following
from remat.transforms.eager.inputs import Inputs
from remat.transforms.eager.recording import Traced, may_keep_around
from remat.transforms.eager.saved import unread, watcher

__all__ = [
    "Plain",  # a frame that keeps the arguments and recomputes all, up to the last value packed
    "enclosed",  # whether the saved-tensor hooks in force are those of a region
    "stop_enclosing",  # end the enclosing recomputation where this region was its last need
    "Following",  # compares each op with the one expected
    "Inputs",  # the arguments of one call, its random state, its ambient state, and the modules it sees
    "Traced",  # records its forward (`tape.recorder.Record`) and replays it (`tape.replay.Replay`)
    "may_keep_around",  # whether a region around the call may keep values
    "unread",  # the second of two hooks that only watch what is saved
    "watcher",  # whom to tell what a region reads without being given it, None if nobody needs to know
]
