"""Every private name of torch that the engine touches: the other rooms see only this face."""

from remat.transforms.compat.ambient import (
    DeviceContext,  # what `with torch.device(...)` makes a torch-function mode
    autocasting,  # whether autocast is on for any device
    bits,  # whether the numbers in a tensor's memory stand for their conjugates, and for their negatives
    cached_weights,  # what `torch.nn.utils.parametrize.cached()` has computed
    data_of,  # the data of a tensor, of which no torch-function mode is told
    function_mode_at,  # the torch-function mode at this place, from the outermost
    function_modes,  # how many torch-function modes are active
    function_stack,  # have these torch-function modes on and no others
    function_state,  # whether torch functions ask their modes and subclasses
    functions_as_they_are,  # a context without torch-function modes
    functions_off,  # that state where they do not
    is_strided,  # whether `value` is a tensor with one block of memory behind it
    modules_watched,  # whether any global module hook is set
    ordinary,  # tensors of the same memories that were not made in inference mode
    outside_inference,  # whether ops here are not those of inference mode
    scripted_now,  # the tensor that a module of TorchScript holds at such a place
    scripted_places,  # where a module of TorchScript holds tensors
    set_data,  # give a tensor other data, of which no torch-function mode is told
    set_function_state,  # set whether torch functions ask their modes and subclasses
    set_grad_enabled,  # what torch.set_grad_enabled calls, without an object for the way back
    set_scripted,  # let it hold another one there
    storage_held,  # keeps the key of a storage from being given to another one
    storage_key,  # an address that aliases share
    switches,  # (read, write) of what changes which kernel an op picks
    torch_pytree,  # torch's module of trees, and its registry of containers
    with_bits,  # a look at the same memory with these two flipped
    without_module_trackers,  # take the global module hooks of torch's own observers away for a while
)
from remat.transforms.compat.aot import (
    above_all,  # let autograd and functorch work in the kernel of an op
    at_hand,  # a number; of a symbol the one that it has in the example
    backend,  # the compiler that torch.compile knows as `name`
    compiled_bare,  # `graph` compiled by a backend, without what keeps Dynamo from looking inside
    compiler,  # what compiles the graph that is being traced
    dual_level_known,  # tell Python of a forward-mode level that a graph has opened
    dual_level_known_if_any,  # `dual_level_known` where a forward-mode level is active
    example_bytes,  # the bytes of a tensor, of the example where sizes are symbolic
    example_of,  # a size as a number
    in_forward_mode,  # whether a forward-mode level is active, torch.func's or a plain one
    level_argument,  # which argument of a function in Dynamo's graph is a level's number
    live_with_graph,  # keep `thing` for as long as the code that Dynamo is making now
    stands_on,  # where tensors stand while graphs are traced for a compiler
    teach_inductor,  # tell Inductor how to lower the library's own ops
    traced_functionally,  # a graph of the aten ops of a function
)
from remat.transforms.compat.autograd import (
    GRAD,  # the kind of a level of grad
    JVP,  # the kind of a level of jvp
    VMAP,  # the kind of a level of vmap
    SingleLevelFunction,  # an autograd function for one level
    add_batch_dim,  # wrap a tensor for a vmap's level
    allow_hooks,  # accept saved-tensor hooks
    around_function_apply,  # say how an `autograd.Function` runs below functorch levels, and at one
    ask_about_function,  # ask a torch-function mode about an `autograd.Function`
    at_backward_end,  # run `callback` when the running backward pass ends
    at_function_apply,  # say what `autograd.Function.apply` goes on with below functorch levels
    at_transforms,  # have some saved-tensor hooks off within transforms of torch.func
    autograd_again,  # undo `below_autograd` for hooks of the user's
    batch_size,  # how large a vmap's batch is
    batched_grads_around,  # how many calls with `is_grads_batched` are around
    below_autograd,  # within, ops make no nodes, whatever grad mode says
    below_levels,  # leave all functorch levels for a while
    depth,  # how many functorch levels are active, the number of the innermost one
    drop_guards,  # let go of what an error keeps that changes, when it goes, what is dispatched to
    dual_level_open,  # whether a forward-mode level is open
    enable_single_level_autograd_function,  # lets those functions run
    engine_grad,  # `torch.autograd.grad` without its checks
    engine_runs,  # whether the running backward will run a node
    every_level,  # the active functorch levels from the outermost
    forward_ad_active,  # whether a plain `forward_ad.dual_level` is open and one of `tensors` has a tangent
    forward_grad_enabled,  # forward mode on or off
    function_modes_asked,  # whether torch functions ask modes here
    functions_lost,  # whether a backward runs without the functions of users' classes
    graded_under,  # `torch.autograd.grad` from inside a torch-function mode, with one on meanwhile
    graph_kept,  # whether the running backward keeps its graph
    graph_memory,  # the storage of a tensor in a trace
    graph_storage,  # what aliases of one memory have in common in a trace
    graph_task,  # the number of the running backward, -1 outside
    has_functions,  # whether a tensor's class has torch functions
    has_no_level_rule,  # whether `error` is that of an operator on functions without a rule for a level
    has_tangent,  # whether the innermost level pushes a tangent forward
    hooks_allowed,  # lift the refusal that `torch.func` puts on saved-tensor hooks
    hooks_as_they_are,  # afterwards saved-tensor hooks are refused as before, or not
    hooks_aside,  # take all saved-tensor hooks off for a while
    hooks_disabled,  # the message with which saved-tensor hooks are refused, or None
    in_pass_of_func,  # whether the backward pass at hand is that of a transform of torch.func
    in_transform,  # whether any functorch level is active
    innermost_level,  # the innermost functorch level, where there is one
    interpreter,  # the innermost functorch level, or None outside every transform
    is_batched,  # whether a tensor is a vmap's
    is_batched_anyhow,  # whether writing `tensor` into a plain tensor would fail for a batch dimension
    is_batched_below,  # whether any level around here has a batch of this tensor
    is_dead,  # whether a wrapper outlived its level
    is_hook_refusal,  # whether `error` is torch.func's refusal to run under saved-tensor hooks
    is_legacy_batched,  # whether a tensor is of the vmap from before functorch
    is_tracing,  # whether what runs now is being traced below autograd, functionalized, for a compiler
    is_wrapped,  # whether a tensor belongs to a level
    level_of,  # the level that a tensor belongs to
    level_stack,  # all of them, from the outermost; None outside every transform
    levels,  # the same as numbers, kinds and vmap's randomness
    made_dual,  # a tensor that a level of forward mode pushes a tangent of forward
    next_node,  # the number that this thread's next autograd node gets
    no_view,  # what a torch function returned, as no view
    outside_batched_grads,  # leave the vmap of `is_grads_batched`, under which no op may draw
    parts_of,  # the plain tensors that make up a tensor with tangents, and the wrappers around them
    pop_hooks,  # take the innermost saved-tensor hooks off
    profiling,  # whether a profiler of autograd is on
    push_hooks,  # set saved-tensor hooks without a context manager's cost
    refuse_hooks,  # refuse them, with this message
    restore_vmap,  # vmap with its level's settings given
    running_node,  # the node that this thread's backward pass is running, None outside of one
    set_version,  # let a tensor's version be another one
    tangent_of,  # what the innermost level pushes forward of a tensor of its own
    top_hooks,  # the innermost saved-tensor hooks of this thread
    unwind_levels,  # leave the functorch levels of this thread above one
    unwrap_batched,  # a vmap's tensor and its batch dimension
    unwrap_for_grad,  # take a level of grad off a tensor
    unwrap_if_dead,  # take dead wrappers off
    unwrap_once,  # take one wrapper off
    unwrapped,  # the plain tensor at the bottom of all functorch wrappers of `tensor`
    version_kept,  # writes to a tensor within are told to nobody
    watch_transforms,  # have that asked from now on, or no more
    wrap_for_grad,  # wrap a tensor for a level of grad or jvp
    wrapped_dead,  # a tensor in the wrapper of a level of grad that has ended
    wrappers_of,  # the plain tensor below all levels, and the wrappers around it
)
from remat.transforms.compat.compiled_code import (
    COMPILED_CODE,  # the op that Inductor's code is to modes
    code_seen,  # whether they see it so
    compiled_branches,  # have compiled functions run compiled in branches of torch.cond
    intercept_compiled_cond,  # have torch.cond compile itself no more in some places
    seen_as_one_op,  # have them see it so
    uncompiled_calls,  # have compiled functions run as Python in this thread for a while
)
from remat.transforms.compat.fx import (
    SUBGRAPH_CALL,  # torch's operator on a subgraph, None where there is none
    NodeSpan,  # the nodes that a tracer adds from the making of this on
    Template,  # a stretch of a graph, as a function of some of the tensors that it reads
    as_it_is,  # `tensor` as a value of the graph, which nothing that is written to it later changes
    described,  # what the tracer's nodes depend on in these tensors
    in_cuda_graphs,  # whether what is traced now runs in CUDA graphs
    is_inductor,  # whether a backend is Inductor
    is_pure_node,  # whether a node writes to nothing, so that a copy does the same
    last_node,  # what the tracer has added last
    lowered_once,  # whether a compiler is at work that lowers a subgraph once for all of its calls
    must_save,  # keep the partitioner from computing a value of the graph again in the backward
    nodes_of,  # the nodes of tensors in the graph that is being traced
    tagged,  # within, nodes also bear these in their `meta["custom"]`
    tags,  # what the nodes that a trace makes now bear in their `meta["custom"]`
    traced,  # the tracer at work and the node of a tensor
    tracer_at_work,  # the tracer that writes down what runs now, functionalized and on fake tensors
    unmarked,  # the function that `torch.compiler.nested_compile_region` has marked
    written_in,  # a graph with all calls of subgraphs written in
)
from remat.transforms.compat.generators import (
    CompactState,  # the state of a CPU generator, told by an earlier one
    has_drawn,  # after an op: how many numbers a generator has drawn
    set_state,  # let a generator have a state that `state_of` gave
    state_of,  # the state of a generator, small within a run of small draws
)
from remat.transforms.compat.graph import (
    Hooked,  # hooks of ours are there: what they raise where that is all that is asked
    hook_saved,  # give hooks to what a node has saved without any
    is_stale,  # whether a tensor is left from an earlier step, and its graph or its vmap is gone
    listed,  # what such a slot holds: a saved tensor, or several
    saved_by,  # the tensors that a node has saved without hooks, each with its slot
    saved_slots,  # where a node of a kind saves tensors
)
from remat.transforms.compat.modes import (
    DispatchMode,  # the base of every dispatch mode: compiled functions under it run compiled
    HigherOrderOperator,  # an operator on functions
    OpOverload,  # an op
    OpOverloadPacket,  # all overloads of an op
    active_modes,  # those modes, outermost first
    cond,  # the operator that torch.cond calls
    direct_call,  # what calling `op` comes down to, without the Python method in between
    dispatch_is_off,  # whether ops reach no dispatch mode here
    fake_mode,  # the fake mode of the tensors at hand, or a new one
    fakes_watched,  # note the fake modes that are made meanwhile
    intercept_under_modes,  # run something in place of an operator where a mode is active
    is_composite,  # whether an op is made of others, which a dispatch mode sees in its place
    is_fake,  # whether a tensor has no data because it is fake
    jit_trace,  # what torch.jit.trace writes to, None where it does not
    memory_is_real,  # whether new tensors have memory
    modes_active,  # how many dispatch modes are active, torch's own for tracing included
    modes_aside,  # within, dispatch modes of one kind see nothing
    outside_all_modes,  # step out of every dispatch mode and functorch level
    traced_as_it_runs,  # whether make_fx writes down what runs now, and no compiler has asked for it
    uncompiled,  # a function of which Dynamo compiles no frame, nor of what it calls
    unseen,  # within, ops on `tensor` reach no dispatch mode
    watch_fused_steps,  # tell of the parameters that a fused optimizer has written to
    watched,  # whether hooks or a dispatch mode follow what runs here
)
from remat.transforms.compat.patches import (
    exchange,  # put something in the place of an attribute of torch
)
from remat.transforms.compat.sharding import (
    bookkeeping_aside,  # how wrappers of modules are to run what is for ends of their own
    groups_in,  # the groups that a collective is called with
    ragged_again,  # let lengths made again stand for the same ragged size
    sharding_aside,  # how DTensor is to run what it propagates shardings by
)
