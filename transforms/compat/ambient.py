"""What is set around an op on this thread, and what a tensor is made of.

Private names of torch, each with its reason. Supported: torch 2.11 to 2.15. Unless a line says otherwise a
name was tried on 2.11.0, 2.13.0 and 2.15.0 (CPU), by the whole test suite.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._device
from torch.nn.modules import module as _modules
from torch.utils import _pytree as torch_pytree  # noqa: F401  (its registry of containers has no public access)
from torch.utils._python_dispatch import _disable_current_modes

from remat.transforms.errors import RematError

# -- ambient state ------------------------------------------------------------------------------------
# What torch.set_grad_enabled calls, without an object for the way back.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# Whether autocast is on for any device.
autocasting: Callable[[], bool] = torch._C._is_any_autocast_enabled


def _set_warn_only(value: bool) -> None:
    torch.use_deterministic_algorithms(torch._C._get_deterministic_algorithms(), warn_only=value)


# (read, write) of every global that changes which kernel an op picks or what a factory makes. A region that
# saw another value in its forward would otherwise replay other ops, or other numbers. The private readers are
# what the public ones call: they are called for every region, and those are Python functions.
switches: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_deterministic_algorithms, torch.use_deterministic_algorithms),
    # (After the one above, which writes both.)
    (torch._C._get_deterministic_algorithms_warn_only, _set_warn_only),
    (torch._C._get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch._C._get_flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch._C._get_math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
)
if torch.backends.cuda.is_built():
    # These two say nothing to the CPU's kernels, and each read counts: it happens twice for every region.
    switches += (
        (torch._C._get_mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
        (torch._C._get_cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    )

# How many torch-function modes are active.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
# The one at this place, from the outermost.
function_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at
# What `with torch.device(...)` and `set_default_device` put there.
DeviceContext = torch.utils._device.DeviceContext


@contextlib.contextmanager
def function_stack(modes: Sequence[Any]) -> Iterator[None]:
    """Have these torch-function modes on and no others; what their classes do when entered is not done."""
    before = [function_mode_at(i) for i in range(function_modes())]
    _put_on(modes)
    try:
        yield
    finally:
        _put_on(before)


def _put_on(modes: Sequence[Any]) -> None:
    for _ in range(function_modes()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


# Whether ops here are not those of inference mode. A level of torch.func turns the flag off and leaves the
# keys of dispatch: below it nothing is recorded, though `torch.is_inference_mode_enabled()` says no (2.13).
outside_inference: Callable[[], bool] = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.ADInplaceOrView
)


def ordinary(values: Iterable[Any], leaves: bool = False) -> list[Any]:
    """The same memories as tensors that plain autograd saves, and that ops treat as others: it does neither
    of what was made in inference mode. `leaves`: as tensors that require no gradient, too. (In a graph that
    make_fx writes, which has no place for storages, they are copies.)"""
    with functions_as_they_are():
        return [_ordinary(v, leaves) if isinstance(v, torch.Tensor) else v for v in values]


def _ordinary(tensor: torch.Tensor, leaf: bool) -> torch.Tensor:
    if not tensor.is_inference():
        return tensor.detach() if leaf else tensor
    if tensor.requires_grad and torch.is_grad_enabled() and not leaf:
        raise RematError(
            "a tensor that was made in inference mode and requires gradients reaches a scan, or a region "
            "under torch.func. Autograd saves none. Make it outside of inference mode, or pass a clone."
        )
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
            return tensor.clone()
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def storage_key(tensor: torch.Tensor) -> int:
    """An address that aliases share: the storage object (works for fake tensors, which have no data)."""
    # A pack hook may ask while a torch-function mode is on, which would take this for a call of the user's.
    with functions_as_they_are():
        return tensor.untyped_storage()._cdata


def cached_weights() -> dict[Any, Any]:
    """What `torch.nn.utils.parametrize.cached()` has computed. (Its table has no public name.)"""
    return getattr(sys.modules.get("torch.nn.utils.parametrize"), "_cache", {})


def storage_held(tensor: torch.Tensor) -> Any:
    """A weak reference to a storage: while it lives no other storage has that one's key."""
    from torch.multiprocessing.reductions import StorageWeakRef

    with functions_as_they_are():
        return StorageWeakRef(tensor.untyped_storage())


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.data`, of which no mode is told: under fakes that of a real tensor would be a fake."""
    with _disable_current_modes(), functions_as_they_are():
        return tensor.data


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """`tensor.data = data`, of which no torch-function mode is told."""
    with functions_as_they_are():
        tensor.data = data


# Whether torch functions ask modes and subclasses, and how it is set (the classes for contexts cannot go
# back to a state that the user has set).
function_state: Callable[[], Any] = torch._C._get_torch_function_state  # pyright: ignore[reportAttributeAccessIssue]
set_function_state: Callable[[Any], None] = torch._C._set_torch_function_state  # pyright: ignore[reportAttributeAccessIssue]
functions_off: Any = torch._C._TorchFunctionState.ALL_DISABLED  # pyright: ignore[reportAttributeAccessIssue]
# A context in which no torch-function mode answers for an attribute such as `requires_grad`.
functions_as_they_are: Callable[[], contextlib.AbstractContextManager[None]] = torch._C.DisableTorchFunction


def is_strided(value: Any) -> bool:
    """Whether `value` is a tensor with one block of memory behind it."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether the numbers in its memory stand for their conjugates, and for their negatives."""
    return tensor.is_conj(), tensor.is_neg()


def with_bits(tensor: torch.Tensor, bits: tuple[bool, bool]) -> torch.Tensor:
    """A look at the same memory with these two flipped: twice is as before."""
    if bits[0]:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if bits[1] else tensor  # pyright: ignore[reportPrivateImportUsage]


def modules_watched() -> bool:
    """Whether any global module hook is set: cheap enough to ask at every recomputation."""
    return bool(_modules._global_forward_pre_hooks or _modules._global_forward_hooks)


# Where torch keeps the hooks that run for every module; the tables have no public access.
module_hooks: tuple[Any, ...] = (
    _modules._global_forward_pre_hooks,
    _modules._global_forward_hooks,
    _modules._global_backward_pre_hooks,
    _modules._global_backward_hooks,
)


@contextlib.contextmanager
def without_module_trackers() -> Iterator[None]:
    """Take the global module hooks of torch's own observers away for a while.

    `FlopCounterMode` and the memory tools follow modules by hooks on gradients, which `torch.autograd.grad`
    refuses for leaves; nor should a trace be counted. Users' global hooks stay: they may run ops.
    """
    before = [list(table.items()) for table in module_hooks]
    for table, hooks in zip(module_hooks, before, strict=True):
        for key, hook in hooks:
            if type(getattr(hook, "__self__", None)).__module__.startswith("torch."):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(module_hooks, before, strict=True):
            table.clear()
            table.update(hooks)


# -- scripted --------------------------------------------------------------------------------------------
# Modules of TorchScript: their tensors lie in C++, past torch functions and past tables of Python's.


# What C++ holds of a module, by name. The wrappers of `torch.jit` around these are no dicts and find nothing.
_TABLES: Any = (torch._C.ParameterDict, torch._C.BufferDict)
_MODULES: Any = torch._C.ModuleDict
_KINDS: Any = (torch._C.ScriptModule, torch._C.ScriptObject)


def scripted_places(attributes: dict[str, Any]) -> list[tuple[Any, str, torch.Tensor]]:
    """Where a scripted or traced module with these attributes holds tensors: C++ module, name, tensor.

    Nothing for other modules. One that is frozen has its tensors in its code.
    """
    # Of what `torch.jit.trace` returns, the module is one of its attributes.
    inner = attributes.get("_actual_script_module")
    held = attributes if inner is None else object.__getattribute__(inner, "__dict__")
    module = held.get("_c")
    if not isinstance(module, _KINDS):
        return []
    found, stack = [], [module]
    for part in stack:
        found += [(part, name, tensor) for table in _TABLES for name, tensor in table(part).items()]
        stack += [child for _, child in _MODULES(part).items()]
    return found


def scripted_now(module: Any, name: str) -> torch.Tensor:
    """The tensor that a module holds there."""
    return module.getattr(name)


def set_scripted(place: tuple[Any, str], tensor: torch.Tensor) -> None:
    """Let a module hold another tensor there."""
    module, name = place
    module.setattr(name, tensor)
