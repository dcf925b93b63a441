"""A scan as one differentiable function, its backward run by a checkpointing schedule."""

from remat.transforms.scan.body import Body
from remat.transforms.scan.function import run
from remat.transforms.scan.instructions import Action, Advance, Free, Restore, Reverse, Store, execute
from remat.transforms.scan.spec import make

__all__ = [
    "Body",  # `body(carry, x) -> (carry, y)` as a step over flat lists
    "run",  # the final carry and the stacked ys, differentiable with respect to `flat`
    "Action",  # any of the five
    "Advance",  # evaluate steps `start
    "Free",  # empty `slot`
    "Restore",  # take `x[step]` in hand from `slot`
    "Reverse",  # from `x[start]` in hand evaluate steps `start
    "Store",  # copy the state in hand, `x[step]`, into `slot`
    "execute",  # run `actions` on `machine`, in order
    "make",  # a scan and its operands
]
