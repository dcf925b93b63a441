"""The ops of a region's forward: recorded, or held against an earlier tape; what of them runs again."""

from remat.transforms.tape.follower import (
    TraceFollower,  # a recorder that expects the ops of an earlier tape
)
from remat.transforms.tape.kept_values import (
    KeptValues,  # the part of a recorder that keeps values
)
from remat.transforms.tape.observers import (
    Kept,
    holders,
    holds,
    listen,
    made_by,
    noticing,
    report,
)
from remat.transforms.tape.program import (
    Program,  # what of a tape has to run for some of the values that autograd saved
)
from remat.transforms.tape.reachability import (
    Ends,
    Reachability,
    read_for_shape,
    shapes_read,
    standing_for,
)
from remat.transforms.tape.recorder import (
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
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    Needs,
    Node,
    Ref,
    Stop,
    Tape,
    ValueNumbering,
    holds_unseen,
    map_tensors,
    nodes_behind,
    refs_in,
)
