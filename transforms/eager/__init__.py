"""Regions under plain autograd: a frame of saved-tensor hooks around the function."""

from remat.transforms.eager.frame import (
    Frame,  # one forward of a region, and what it takes to make again what its backward reads
)
from remat.transforms.eager.inputs import (
    Inputs,  # the arguments of one call, and the state around it
    steering,  # what arguments that are no tensors tell of the ops that run
)
from remat.transforms.eager.levels import (
    NOT_BELOW,  # what `served_level` is where no level does so, and no frame serves plain autograd below
    NOTHING_REVERSED,  # the same, where one does
    LevelFrame,  # a frame at one level of torch.func
    LevelInputs,  # the arguments of one call at a level
    Unserved,  # a forward that the primitive must run
    served_level,  # the level that differentiates, if it is the only one and a frame serves what runs here
)
from remat.transforms.eager.rerun import (
    stop_enclosing,  # end the run of an enclosing region's function, where it has all it needs
)
from remat.transforms.eager.saved import (
    Yielding,  # base of what stands behind hooks that are off within transforms of torch.func
    enclosed,  # whether the saved-tensor hooks in force are those of a region
    hook,  # push such hooks
    users,  # the innermost saved-tensor hooks that are the user's own
    users_own,  # whether hooks are the user's own, with no region in between
)
