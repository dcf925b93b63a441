"""Private names of torch that the product alone touches; those of the engine are in `transforms/compat/`."""

from remat._torch.compilers import (
    as_inductor_gets_it,  # a joint graph in the ops that it is asked about under Inductor
    bypassing_wrapper,  # the operator by which Dynamo leaves to us what is done with a traced function
    compiled_for_graphs,  # `fn`, compiled as far as Inductor's partitioner and decompositions go
    dynamo_errors,  # what Dynamo raises where it cannot trace a function
    hooks_guarded,  # within, Dynamo compiles again for a module that has got a hook
    partitioner_choice,  # what torch's min-cut partitioner would save
)
from remat._torch.dynamo import (
    BROKEN,  # the message where a graph breaks amid a capture
    is_inner,  # whether the code at hand is traced into the graph of an operator
    is_near,  # whether what `push` set was set in the graph at hand
    levels_of,  # what to take off a tensor, in order, so that it has no functorch level deeper than `depth`
    libraries_ready,  # lets libraries do what they do at their first call
    made_here,  # a tensor that the graph at hand is given, as one of its own
    pop,  # undo the last `push`
    push,  # let `top()` be `value`, any object that traced code made, until `pop()`
    ready,  # call this before any other function here
    remove_batch_dim,  # by the names that torch.func itself has for them, which Dynamo knows
    share_floats,  # lets regions and scans that are traced read the same float
    top,  # what was pushed last, None if there is nothing
    traced_depth,  # the number of the innermost functorch level, 0 outside every transform
    traced_unwrap,  # `unwrap_for_grad` under the name that Dynamo knows
)
from remat._torch.fakes import (
    DEVICE,  # the op that asks a tensor where it is
    Repeats,  # runs ops on tensors without data, those whose like has run before in a third of the time
    asking_nobody,  # a function of torch that calls others, for a mode that is to see these
)
from remat._torch.gathered import (
    nothing_gathered,  # within, wrappers of modules gather nothing: tensors made there stand for parameters
)
from remat._torch.groups import (
    accumulating,  # the leaves of a wrapped module that gradients come to
    data_parallel,  # how the module that runs is spread by FSDP or DistributedDataParallel
    fake_mesh,  # a device mesh on torch's fake process group
    gathers,  # whether FSDP2 has wrapped a module
    process_group,  # the ranks of the group of this name
    reduced_in,  # the dtype in which FSDP2 reduces gradients
    world_store,  # the store by which the processes of this job have met
    wrapped_in,  # the module around a call whose gradients ranks reduce
)
from remat._torch.looks import (
    backwards_watched,  # run what Python starts as a backward, and be told of storages that get another size
    resize_storage,  # give a storage another size, which nobody is told of
    states_watched,  # be told of states of the CPU's generator that somebody takes
)
from remat._torch.modules import (
    module_path,  # the path of the module that runs, or is about to
    paths_of,  # the paths of the modules that a graph's nodes come from
)
