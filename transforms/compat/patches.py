"""Every function of torch that is exchanged for the whole process, why, and the one way to do so.

Each goes on to torch's own where no region, look or capture is concerned. Supported: torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

# From the import of remat on.
AT_IMPORT = {
    "torch._functorch.eager_transforms._autograd_grad": (
        "tells the passes of a torch.func transform from those of a user's"
    ),
    "torch._functorch.utils.unwrap_dead_wrappers": (
        "autograd.Function.apply hands its arguments to nothing else below the levels"
    ),
    "torch._functorch.autograd_function.CustomFunctionHigherOrderOperator.__call__": (
        "an autograd.Function at a level"
    ),
    "torch._functorch.autograd_function.generate_single_level_function": "its rules at a level",
    "torch.autograd.function.Function.apply": (
        "an autograd.Function below the levels (2.15, where apply is C++)"
    ),
    "torch.autograd.function._SingleLevelFunction.apply": "an autograd.Function below the levels (to 2.14)",
    "torch.autograd.forward_ad.enter_dual_level": (
        "torch counts levels for the process and does not say whose one is"
    ),
    "torch.autograd.forward_ad.exit_dual_level": "as above",
    "torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth": (
        "after a graph that fails, forward mode is left as its levels are"
    ),
    "torch._higher_order_ops.utils.setup_compilation_env": (
        "torch.cond compiles itself where a region must see its branches"
    ),
}
# From the first region on that has to do with them.
AT_FIRST_USE = {
    "torch._dynamo.eval_frame._callback_from_stance": (
        "one thread runs compiled functions as Python; a stance is for all"
    ),
    "torch._inductor.output_code.CompiledFxGraph.__call__": "compiled code is one op to our dispatch modes",
    "torch.distributed.fsdp._flat_param.FlatParamHandle": (
        "FSDP gathers and frees parameters: no ops of a region"
    ),
    "torch.distributed.fsdp._runtime_utils": "as above",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": "as above, for FSDP2",
    "torch.distributed._composable.replicate._ReplicateState": (
        "it moves parameters into buckets amid a forward"
    ),
    "torch._C._distributed_c10d.Reducer": "as above, for DistributedDataParallel",
    "torch.distributed.tensor._dispatch.OpDispatcher": (
        "DTensor tries an op on fakes and weighs costs: no ops of a region"
    ),
    "torch.distributed.tensor._sharding_prop.ShardingPropagator": "as above",
}
# While somebody looks, captures or compiles; torch's own stands there again afterwards.
FOR_A_WHILE = {
    "torch._functorch.eager_transforms._wrap_for_grad": (
        "transforms wrap what they are given without a torch function"
    ),
    "torch._functorch.vmap._add_batch_dim": "as above",
    "torch._functorch.vmap._remove_batch_dim": "of a result without a batch it makes a new tensor",
    "torch.autograd.variable.Variable._execution_engine": "a look is asked about backwards inside",
    "torch.storage.UntypedStorage.resize_": "a look is told of storages that are resized, which is no op",
    "torch.get_rng_state": "a look is told of states of generators that are taken, which is no op",
    "torch._dynamo.variables.builder.VariableBuilder.wrap_symfloat": (
        "floats of a region's graph are inputs of the graph around"
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": "a look gathers no parameters",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "as above",
    "torch.nn.parallel.distributed.DistributedDataParallel": "as above",
}
PATCHES = {**AT_IMPORT, **AT_FIRST_USE, **FOR_A_WHILE}


def place(owner: Any) -> str:
    """The name of a module, of a class, or of the class of an object."""
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return getattr(owner, "__name__", None) or place(type(owner))


def exchange(owner: Any, name: str, new: Any) -> None:
    """Put `new` in the place of an attribute of torch, which `PATCHES` lists, or its owner."""
    where = place(owner)
    if f"{where}.{name}" not in PATCHES and where not in PATCHES:
        raise KeyError(f"{where}.{name}")
    setattr(owner, name, new)
