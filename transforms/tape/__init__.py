"""The ops of a region's forward: recorded, or held against an earlier tape; what of them runs again."""

from remat.transforms.tape.follower import (
    TraceFollower,  # a recorder that expects the ops of an earlier tape
)
from remat.transforms.tape.kept_values import (
    Kept,  # one tensor that a region keeps from its forward to its backward
    KeptValues,  # the part of a recorder that keeps values
    holders,  # who holds tensors from outside, by weak references
    holds,  # note one of them
    listen,  # collect what the regions called inside keep, in a new list or whatever else has `append`
    made_by,  # the blocks of memory of an op's results that are not those of its operands, with their keys
    noticing,  # not empty once fused steps are watched
    report,  # tell every listener of this thread of a kept tensor
)
from remat.transforms.tape.program import (
    Program,  # what of a tape has to run for some of the values that autograd saved
)
from remat.transforms.tape.reachability import (
    Ends,  # the nodes that made the results of a forward, and those behind each
    Reachability,  # the results of one forward with the autograd nodes behind each
    read_for_shape,  # the saved values whose shape is all that their nodes read
    shapes_read,  # the same of a run that is not on a tape
    standing_for,  # what autograd gets for one: its shape, in the memory of one element
)
from remat.transforms.tape.recorder import (
    CARRIES,  # why a function runs again that writes a derivative into an argument, at a level
    Recorder,  # writes down the ops of a region, or holds them against a tape, and keeps what a policy says
    Replaced,  # a tensor from outside that user code has given other memory
)
from remat.transforms.tape.replay import (
    Recorded,  # one settled forward of a primitive
    Replay,  # hands out kept values where a region's function runs again
    may_be_absent,  # the ops that a second run may leave out
)
from remat.transforms.tape.snapshots import (
    Held,  # a value of a region, held until the backward
    WriteNotes,  # around a forward that nobody records: strays, and what writes to memory from outside
    but_written,  # the kept values but for those that the caller has written to
    data_again,  # let tensors have the memory that they had before a region gave them other
    freed_again,  # let memory that a region frees and fills be as it has found it
    held_values,  # what is kept of ops, to be held until the backward
    lent,  # let memory from outside hold what it held before a region wrote to it
    sent_away,  # what of the kept values is on its way to the host
    versions_again,  # let writes be counted from where they were before a region's
)
from remat.transforms.tape.tape import (
    OFFLOAD,  # the verdict: keep in host memory
    RECOMPUTE,  # the verdict: run again
    SAVE,  # the verdict: keep
    Node,  # one op of a region
    RecomputeSteps,  # which ops of a tape run again for the values that a backward reads
    Ref,  # stands for a value in the template of a call
    Stop,  # ends a recomputation once everything that was asked for is there
    Tape,  # the ops of one run of a region
    ValueNumbering,  # numbers of tensor objects
    map_tensors,  # a function applied to the tensors of an op's results
    nodes_behind,  # the autograd nodes behind some, with numbers from a start on
    refs_in,  # the numbers in a template
)
