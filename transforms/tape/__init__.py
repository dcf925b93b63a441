"""The ops of a region's forward: recorded, numbered, cut to what runs again, replayed."""

from remat.transforms.tape.liveness import Ends, holds_unseen
from remat.transforms.tape.observers import Kept, listen, listening, made_by, report
from remat.transforms.tape.program import Program
from remat.transforms.tape.recorder import Record
from remat.transforms.tape.replay import Replay
from remat.transforms.tape.tape import (
    KEPT,
    OFFLOAD,
    OUTSIDE,
    RECOMPUTE,
    SAVE,
    Node,
    Stop,
    Trace,
    held_tensors,
    map_tensors,
    not_repeated,
    storage,
    targets,
    tensors_in,
    written,
)
from remat.transforms.tape.values import Calls, Ref, Unknown, Values

__all__ = [
    "Ends",  # the results of one forward with the autograd nodes behind each
    "holds_unseen",  # whether a node behind `outs` may read tensors that no saved-tensor hook was told of
    "Kept",  # one tensor that a region keeps from its forward to its backward
    "listen",  # collect what the regions called inside keep, in a new list or whatever else has `append`
    "listening",  # whether anybody listens on this thread
    "made_by",  # the blocks of memory of an op's results that are not those of its operands, with their keys
    "report",  # tell every listener of this thread of a kept tensor
    "Program",  # what a settled trace teaches of later forwards that are the same
    "Record",  # writes down the ops of a region and keeps what `decide` says
    "Replay",  # runs a region again
    "KEPT",  # an op whose value is kept
    "Node",  # one op of a region
    "OFFLOAD",  # the verdict: keep in host memory
    "OUTSIDE",  # stands for a tensor that the region did not make
    "RECOMPUTE",  # the verdict: run again
    "SAVE",  # the verdict: keep
    "Stop",  # ends a recomputation once everything that was asked for is there
    "Trace",  # the ops of one run of a region, and after `settle` what its recomputation has to do
    "held_tensors",  # the tensors held for a kept value, and which are offloaded
    "map_tensors",  # a function applied to the tensors of nested arguments
    "not_repeated",  # the message for a recomputation that runs otherwise than its forward did
    "storage",  # what aliases of one memory have in common
    "targets",  # the tensors that a call writes to
    "tensors_in",  # the tensors of nested arguments
    "written",  # the message for a tensor written between forward and backward
    "Calls",  # writes down how the ops of a forward are called
    "Ref",  # stands for the value of this number among the arguments of a call
    "Unknown",  # a tensor whose origin cannot be told, or something else that cannot be written down
    "Values",  # numbers for the tensors that a forward meets
]
