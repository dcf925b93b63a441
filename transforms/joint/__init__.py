"""The joint graph of a function, forward and backward, for those who plan."""

from remat.transforms.joint.graph import (
    record,  # the joint graph of `fn(*args, **kwargs)`, from metadata alone
)
from remat.transforms.joint.levels import (
    Peeled,  # a call with its functorch wrappers taken off
    captured_at_levels,  # what a function captures that belongs to a level
    peel,  # take every functorch wrapper off the tensors of a call
    record_peeled,  # the joint graph of what the levels run at the bottom
)
from remat.transforms.joint.ops import (
    Joint,  # forward and backward of one call
    Op,  # one dispatched op
    Ref,  # stands for value `id` in the arguments of a recorded op
    Value,  # a tensor of the joint graph
)
