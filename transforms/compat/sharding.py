"""What torch.distributed runs for its own ends, which is no part of a program; and what wrappers of local
tensors keep apart from these.

Private names of torch, each with its reason. Tried on 2.11.0, 2.13.0 and 2.15.0 (CPU).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from remat.transforms.compat.patches import exchange


def sharding_aside(run: Callable[..., Any]) -> None:
    """Let `run(function, *args)` call what DTensor propagates shardings by, from now on.

    The first call of an op with operands that lie so tries it on fake tensors and weighs what moving them
    costs, on small tensors of its own; later calls find that in a cache. Dispatch modes see all of it.
    """
    tensors = sys.modules.get("torch.distributed.tensor")
    dispatcher: Any = getattr(getattr(tensors, "DTensor", None), "_op_dispatcher", None)
    if dispatcher is None or getattr(dispatcher, "_remat_aside", False):
        return
    dispatcher._remat_aside = True
    # What the dispatcher in C++ calls on a miss of its cache; what some ops with rules of their own call.
    for holder, name in (
        (dispatcher, "_propagate_op_sharding_dispatch_slow_path"),
        (dispatcher.sharding_propagator, "propagate"),
    ):
        plain = getattr(holder, name, None)
        if plain is not None:
            exchange(holder, name, functools.partial(run, plain))


# Where parameters are gathered and freed: (module, class or None for the module itself, functions).
_GATHERING: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
    (
        "torch.distributed.fsdp._flat_param",
        "FlatParamHandle",
        ("pre_unshard", "unshard", "post_unshard", "reshard", "post_reshard"),
    ),
    ("torch.distributed.fsdp._runtime_utils", None, ("_register_post_backward_hook",)),
)
# What is arranged once, amid a forward, with ops and collectives: the buckets of DistributedDataParallel.
_ARRANGING: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
    ("torch._C._distributed_c10d", "Reducer", ("_rebuild_buckets",)),
    ("torch.distributed._composable.replicate", "_ReplicateState", ("lazy_init",)),
)
# Where FSDP2 gathers and frees parameters: ops of the program, which a run of the function repeats.
_REPEATED: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "FSDPParamGroup",
        ("unshard", "wait_for_unshard", "reshard"),
    ),
)


def bookkeeping_aside(
    gathering: Callable[..., Any], arranging: Callable[..., Any], repeated: Callable[..., Any]
) -> None:
    """Let these call, from now on, what wrappers of modules do amid a forward for ends of their own.

    `gathering(function, *args)` calls what gathers parameters and frees them, `repeated(function, *args)` the
    same where a run of the function is to do so too, `arranging(function, *args)` what happens once.
    """
    for run, places in ((gathering, _GATHERING), (arranging, _ARRANGING), (repeated, _REPEATED)):
        for module, name, methods in places:
            there: Any = sys.modules.get(module)
            kind: Any = there if name is None else getattr(there, name, None)
            if kind is None or (module, name) in _aside:
                continue
            _aside.add((module, name))
            for method in methods:
                if (plain := getattr(kind, method, None)) is not None:
                    exchange(kind, method, _called_by(run, plain))


_aside: set[tuple[str, str | None]] = set()


def _called_by(run: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def called(*args: Any, **kwargs: Any) -> Any:
        return run(functools.partial(plain, *args, **kwargs))

    return called


def groups_in(op: Any, args: Any) -> set[str]:
    """The names of the groups that a collective which writes into its arguments is called with.

    Messages from one rank to another are none.
    """
    if op.namespace != "c10d" or op._opname.startswith(("send", "recv")):
        return set()
    from torch.distributed import ProcessGroup

    boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
    kinds = [arg._type().qualified_name().rpartition(".")[2] for arg in boxed]  # type: ignore[attr-defined]
    pairs = zip(boxed, kinds, strict=True)
    return {ProcessGroup.unbox(arg).group_name for arg, kind in pairs if kind == "ProcessGroup"}


def ragged_again(lengths: torch.Tensor, size: Any) -> None:
    """Let `lengths`, or offsets, that were made again stand for the same ragged size of jagged tensors.

    Torch gives each tensor of offsets a symbol of its own, and holds gradients against the forward's.
    """
    from torch.nested._internal.nested_tensor import _tensor_symint_registry

    _tensor_symint_registry[lengths] = size
