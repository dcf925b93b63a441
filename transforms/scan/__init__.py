"""A scan as one differentiable function, its backward run by a checkpointing schedule."""

from remat.transforms.scan.body import (
    Body,  # `body(carry, x) -> (carry, y)` as a step over flat lists
    carry_of,  # the leaves of a carry that a body returned, if it is as the one that came in
    check_budget,  # a budget goes with "auto", and "auto" with a budget
    check_count,  # a number of steps as a user writes it
    name_of,  # how messages call a scan
    pair_of,  # what a body returned, if it is a pair
    rows_of,  # the tensors of xs and the number of steps
    unwritten,  # raise if what runs within writes into a step's operands
    version,  # the number of writes into a tensor so far
    ys_of,  # the leaves and the structure of a y, if it can be stacked
)
from remat.transforms.scan.function import (
    run,  # the final carry and the stacked ys, differentiable with respect to `flat`
)
from remat.transforms.scan.instructions import (
    Action,  # any of the five
    Advance,  # evaluate steps `start
    Free,  # empty `slot`
    Restore,  # take `x[step]` in hand from `slot`
    Reverse,  # from `x[start]` in hand evaluate steps `start
    Store,  # copy the state in hand, `x[step]`, into `slot`
)
from remat.transforms.scan.spec import (
    ScanSpec,  # what a scan is
    Structure,  # the structure of a tree, and of each leaf the shape and dtype
    make,  # a scan and its operands
    structure_of,  # the structure of a tree as it stands
    with_step_note,  # one step of a scan; an exception says which
)
