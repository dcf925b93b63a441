"""The joint graph of a function, forward and backward, for those who plan."""

from remat.plan.joint.attention import (
    all_for_target,  # whether what lies on a CPU is planned for another device
    attention_on_gpu,  # the fused kernel of attention that a GPU takes
    planned_for,  # within, tensors without a device are planned for this one
    target_kind,  # that kind
)
from remat.plan.joint.graph import (
    record,  # the joint graph of `fn(*args, **kwargs)`, from metadata alone
)
from remat.plan.joint.holes import (
    Shell,  # what a call returns, without data
    is_held,  # whether somebody else holds a tensor among arguments
    left_out,  # the results of a call that is left out of the graph around
    shell_of,  # what a call returns, by a run on fake tensors
    tensors_given,  # the tensors among arguments, each once
)
from remat.plan.joint.levels import (
    Peeled,  # a call with its functorch wrappers taken off
    captured_at_levels,  # what a function captures that belongs to a level
    peel,  # take every functorch wrapper off the tensors of a call
    record_peeled,  # the joint graph of what the levels run at the bottom
)
from remat.plan.joint.ops import (
    OPTIONAL,  # what the names of ops end in that may not run
    Hole,  # a call that was left out of a joint graph
    Joint,  # forward and backward of one call
    Op,  # one dispatched op
    Ref,  # stands for value `id` in the arguments of a recorded op
    Value,  # a tensor of the joint graph
    dense,  # strides in an order, without gaps
    learned,  # the forward half of a joint graph, from the tape of a call that has run
)
from remat.plan.joint.ran import (
    Apart,  # a call that runs in the forward, and again in the backward, where its graph is recorded
    record_run,  # the joint graph of `fn(*args, **kwargs)`, from a run on tensors with data
)
from remat.plan.joint.stand_ins import (
    NotOnFakes,  # a function needs data, so that it cannot be looked at before it runs
    on_fakes,  # what `run(*args, **kwargs)` returns on fake tensors like those given
)
from remat.plan.joint.workspace import (
    CONVOLUTION,  # the op
    CONVOLUTION_BACKWARD,  # that of both its gradients
    MOST_RUN,  # what reads more bytes is not run to find out what it takes
    RNN,  # an LSTM of oneDNN
    gpu_workspace,  # bytes that live while a GPU runs an op, beside what it reads and makes
    turned_bytes,  # bytes that a convolution copies so that channels come last
)
