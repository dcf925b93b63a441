"""Modules that are spread over devices, in a run on tensors without data: nothing is gathered or sent there.

Wrappers of torch.distributed gather parameters around a module's forward, and count passes there. In such a
run stand-ins of the whole parameters take their place, and wrappers do nothing else. What is left are the ops
that this process computes.

Private names of torch, each with its reason. Tried on 2.11.0 and 2.13.0 (CPU).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from remat.transforms import MISSING
from remat.transforms.closure import hold
from remat.transforms.compat import exchange


class _Run:
    """One run without data; `untracked(function)` calls what is no op of it."""

    def __init__(self, untracked: Callable[..., Any]) -> None:
        self.untracked = untracked
        self._made: dict[Any, torch.Tensor] = {}
        # What stands in modules otherwise, by units that are gathered together; and attributes of objects.
        self._before: dict[int, dict[tuple[int, str], tuple[Any, str, Any, Any]]] = {}
        self._noted: dict[int, tuple[Any, dict[str, Any]]] = {}

    def whole(self, key: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A parameter in the whole, the same one for each key."""
        if key not in self._made:
            self._made[key] = self.untracked(make)
        return self._made[key]

    def put(self, unit: Any, module: Any, name: str, tensor: torch.Tensor) -> None:
        """Let a module have this parameter until its unit is freed."""
        held = module._parameters.get(name, MISSING), module.__dict__.pop(name, MISSING)
        self._before.setdefault(id(unit), {}).setdefault((id(module), name), (module, name, *held))
        module._parameters[name] = tensor

    def free(self, unit: int) -> None:
        """Put back what stood in the modules of the unit with this identity."""
        for module, name, parameter, attribute in self._before.pop(unit, {}).values():
            hold([(module._parameters, name, parameter), (module.__dict__, name, attribute)])

    def note(self, owner: Any, **attributes: Any) -> None:
        """Let an object have these attributes in the end."""
        self._noted.setdefault(id(owner), (owner, attributes))

    def end(self) -> None:
        """Put all back."""
        for unit in list(self._before):
            self.free(unit)
        for owner, attributes in self._noted.values():
            hold([(owner.__dict__, name, value) for name, value in attributes.items()])


_run: ContextVar[_Run | None] = ContextVar("remat_without_data", default=None)


@contextlib.contextmanager
def nothing_gathered(untracked: Callable[..., Any]) -> Iterator[None]:
    """Within, wrappers of modules gather no parameters: tensors of their shapes take their place.

    FSDP2, FSDP1, `replicate` and DistributedDataParallel. `untracked(function)` makes those tensors.
    """
    if _run.get() is not None:
        # A run inside of one.
        yield
        return
    run = _Run(untracked)
    with _in_place():
        token = _run.set(run)
        try:
            yield
        finally:
            _run.reset(token)
            run.end()


# How many threads are in such a run, and what stands in torch otherwise.
_lock = threading.Lock()
_runs: list[None] = []
_plain: list[tuple[Any, str, Any, Any]] = []


@contextlib.contextmanager
def _in_place() -> Iterator[None]:
    """Torch's own functions stand there again when no thread is in such a run: Dynamo looks into them."""
    with _lock:
        _runs.append(None)
        for module, name, methods in _INSTEAD if len(_runs) == 1 else ():
            there: Any = sys.modules.get(module)
            kind: Any = there if name is None else getattr(there, name, None)
            for method, instead in methods.items() if kind is not None else ():
                either = _either(plain := getattr(kind, method), instead)
                _plain.append((kind, method, plain, either))
                exchange(kind, method, either)
    try:
        yield
    finally:
        with _lock:
            _runs.pop()
            while _plain and not _runs:
                kind, method, plain, either = _plain.pop()
                if getattr(kind, method) is either:  # (Else a first forward has its own on top, for good.)
                    exchange(kind, method, plain)


def _either(plain: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def called(*args: Any, **kwargs: Any) -> Any:
        run = _run.get()
        return plain(*args, **kwargs) if run is None else instead(run, *args, **kwargs)

    return called


def _nothing(run: _Run, *args: Any, **kwargs: Any) -> None:
    """Do nothing."""


# -- FSDP2 ----------------------------------------------------------------------------------------------


def _root_pre_forward(run: _Run, state: Any, module: Any, args: Any, kwargs: Any) -> Any:
    # By now it says that a forward runs, which it did not before.
    run.note(state, _training_state=type(state._training_state).IDLE)
    return args, kwargs


def _register_pre_backward_hook(run: _Run, state: Any, output: Any) -> Any:
    # Of modules that are sharded together others may have run before.
    run.note(state, _training_state=state._training_state)
    return output


def _pre_forward(run: _Run, group: Any, module: Any, args: Any, kwargs: Any) -> Any:
    for param in () if group.is_unsharded else group.fsdp_params:
        info, whole = param._module_info, run.whole(id(param), functools.partial(_whole, param))
        run.put(group, info.module, info.param_name, whole)
        for shared, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            run.put(group, shared, name, whole)
    return args, kwargs


def _post_forward(run: _Run, group: Any, module: Any, given: Any, output: Any) -> Any:
    run.free(id(group))
    return output


def _whole(param: Any) -> torch.Tensor:
    """As `FSDPParam.init_unsharded_param` makes it: of `param_dtype`, a DTensor under tensor parallelism."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad

    sharded, dtype = param.sharded_param, param.mp_policy.param_dtype
    if hasattr(param._sharded_local_tensor, "fsdp_post_all_gather"):
        raise RuntimeError("a parameter says itself what it is when it is gathered (fsdp_post_all_gather)")
    if dtype is None or not sharded.dtype.is_floating_point:
        dtype = sharded.dtype
    made = torch.empty_strided(
        param._orig_size, param._contiguous_orig_stride, dtype=dtype, device=param.device
    )
    spread = _spread(param, made)
    if spread is not None:
        made = _from_local_no_grad(made, spread)
    return torch.nn.Parameter(made, requires_grad=sharded.requires_grad)


def _spread(param: Any, made: torch.Tensor) -> Any:
    """How tensor parallelism spreads a parameter that is gathered; None where nothing does."""
    if hasattr(param, "_unsharded_dtensor_spec"):
        return None if param._unsharded_dtensor_spec is None else param._get_unsharded_dtensor_spec(made)
    # Torch 2.11 has one layout alone, that of tensor parallelism.
    return param._tp_spec if param.is_dtensor else None


# -- FSDP1 ----------------------------------------------------------------------------------------------


def _flat_root_pre_forward(run: _Run, state: Any, module: Any, args: Any, kwargs: Any) -> Any:
    return args, kwargs


def _flat_pre_forward(
    run: _Run, state: Any, handle: Any, unshard: Any, module: Any, args: Any, kwargs: Any
) -> Any:
    if handle is None:
        return args, kwargs
    if state.mixed_precision.param_dtype is not None:
        raise RuntimeError("FullyShardedDataParallel with mixed precision casts as it gathers")
    flat = handle.flat_param
    for at, (name, owner, _) in enumerate(flat._param_infos):
        if flat._param_extensions[at] is not None:
            raise RuntimeError("FullyShardedDataParallel gathers DTensors")
        run.put(handle, owner, name, run.whole((id(flat), at), functools.partial(_part, flat, at)))
    for name, owner, _, first, holder, _ in flat._shared_param_infos:
        run.put(handle, owner, name, getattr(holder, first))
    return args, kwargs


def _part(flat: Any, at: int) -> torch.Tensor:
    made = torch.empty_strided(flat._shapes[at], flat._strides[at], dtype=flat.dtype, device=flat.device)
    return torch.nn.Parameter(made, requires_grad=flat.requires_grad)


def _flat_post_forward(
    run: _Run, state: Any, handle: Any, reshard: Any, module: Any, given: Any, output: Any
) -> Any:
    run.free(id(handle))
    return output


# -- DistributedDataParallel, replicate ------------------------------------------------------------------


def _inputs(run: _Run, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def _output(run: _Run, wrapper: Any, output: Any) -> Any:
    return output


class _Idle:
    """What `replicate` wraps in the first forward, which moves parameters into buckets."""

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def _post_forward(self, output: Any) -> Any:
        return output


def _lazy_init(run: _Run, state: Any) -> None:
    run.note(state, _ddp=MISSING)
    state._ddp = _Idle()


_FSDP2 = "torch.distributed.fsdp._fully_shard."
_INSTEAD: tuple[tuple[str, str | None, dict[str, Callable[..., Any]]], ...] = (
    (
        f"{_FSDP2}_fsdp_state",
        "FSDPState",
        {
            "_root_pre_forward": _root_pre_forward,
            "_register_pre_backward_hook": _register_pre_backward_hook,
        },
    ),
    (
        f"{_FSDP2}_fsdp_param_group",
        "FSDPParamGroup",
        {
            "pre_forward": _pre_forward,
            "post_forward": _post_forward,
            "unshard": _nothing,
            "wait_for_unshard": _nothing,
        },
    ),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        None,
        {
            "_root_pre_forward": _flat_root_pre_forward,
            "_pre_forward": _flat_pre_forward,
            "_post_forward": _flat_post_forward,
        },
    ),
    (
        "torch.nn.parallel.distributed",
        "DistributedDataParallel",
        {"_pre_forward": _inputs, "_post_forward": _output},
    ),
    ("torch.distributed._composable.replicate", "_ReplicateState", {"lazy_init": _lazy_init}),
)
