"""Every private name of torch that the library touches, with the reason and the versions it was tried on.

Supported: torch 2.11 to 2.15. Unless a line says otherwise a name was tried on 2.11.0, 2.13.0 and 2.15.0
(CPU), by the whole test suite.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _autograd as _autograd_c
from torch._C import _functorch as _functorch_c  # pyright: ignore[reportAttributeAccessIssue]
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import (
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
)
from torch._functorch.utils import enable_single_level_autograd_function
from torch._functorch.vmap import restore_vmap
from torch._higher_order_ops.cond import cond_op
from torch._ops import _compute_keyset
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.nn.modules import module as _modules
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FUNCTIONALIZE",
    "GRAD",
    "JVP",
    "VMAP",
    "SingleLevelFunction",
    "enable_single_level_autograd_function",
    "forward_grad_enabled",
    "restore_vmap",
]

# -- functorch levels ---------------------------------------------------------------------------------
# torch has no public way to write a rule for "a function under grad / vmap / jvp" other than
# autograd.Function, whose jvp rule evaluates the function a second time. custom_function_call is built from
# these same names.
GRAD, JVP, VMAP = TransformType.Grad, TransformType.Jvp, TransformType.Vmap
FUNCTIONALIZE = TransformType.Functionalize
SingleLevelFunction = torch.autograd.function._SingleLevelFunction
forward_grad_enabled = _set_fwd_grad_enabled
_unpack_dual: Callable[..., Any] = torch._unpack_dual  # pyright: ignore[reportPrivateImportUsage]

in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
wrap_for_grad: Callable[[torch.Tensor, int], torch.Tensor] = _functorch_c._wrap_for_grad
unwrap_for_grad: Callable[[torch.Tensor, int], torch.Tensor] = _functorch_c._unwrap_for_grad
unwrap_if_dead: Callable[[torch.Tensor], torch.Tensor] = _functorch_c.unwrap_if_dead
unwrap_once: Callable[[torch.Tensor], torch.Tensor] = _functorch_c.get_unwrapped
is_wrapped: Callable[[torch.Tensor], bool] = _functorch_c.is_functorch_wrapped_tensor
is_dead: Callable[[torch.Tensor], bool] = _functorch_c.is_dead_tensor_wrapper
is_batched: Callable[[torch.Tensor], bool] = _functorch_c.is_batchedtensor
level_of: Callable[[torch.Tensor], int] = _functorch_c.maybe_get_level
add_batch_dim: Callable[[torch.Tensor, int | None, int], torch.Tensor] = _functorch_c._add_batch_dim
unwrap_batched: Callable[[torch.Tensor, int], tuple[torch.Tensor, int | None]] = _functorch_c._unwrap_batched


def is_batched_below(tensor: torch.Tensor) -> bool:
    """Whether any level around here has a batch of this tensor."""
    while is_wrapped(tensor):
        if is_batched(tensor):
            return True
        tensor = unwrap_once(tensor)
    return False


def is_batched_anyhow(tensor: torch.Tensor) -> bool:
    """Whether writing `tensor` into a plain tensor would fail for a batch dimension.

    `torch.autograd.grad(..., is_grads_batched=True)` uses the vmap from before functorch, which has no level.
    """
    return is_wrapped(tensor) or _functorch_c.is_legacy_batchedtensor(tensor)


def interpreter() -> Any | None:
    """The innermost functorch level, or None outside every transform."""
    if not in_transform():
        return None
    return retrieve_current_functorch_interpreter()


@contextlib.contextmanager
def below_levels() -> Iterator[None]:
    """Leave all functorch levels for a while: a vmapped backward asks for values that were made below it."""
    if not in_transform():
        yield
        return
    with temporarily_clear_interpreter_stack(), _snapshot_taken():
        yield


def _snapshot_taken() -> contextlib.AbstractContextManager[Any]:
    """Within, what reaches Python from a dispatch has the state of the dispatch's begin to go back to.

    A functorch level's rule runs below that point, where a tensor that dispatches to Python, as those of
    AOTAutograd do, fails an internal assertion on 2.11. (2.13 and 2.15 do without.)
    """
    key = torch._C.DispatchKey.PythonTLSSnapshot
    excluded = torch._C._dispatch_tls_local_exclude_set()
    if not excluded.has(key):
        return contextlib.nullcontext()
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded.remove(key))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor at the bottom of all functorch wrappers of `tensor`."""
    while is_wrapped(tensor):
        tensor = unwrap_once(tensor)
    return tensor


def cut_off(tensor: torch.Tensor) -> bool:
    """Whether this is a view made with gradients off: torch says that it requires them, as its base does, and
    fails where it is differentiated."""
    with functions_as_they_are():
        return tensor.requires_grad and tensor.grad_fn is None and tensor._base is not None


# -- saved-tensor hooks -------------------------------------------------------------------------------
# The context manager of torch.autograd.graph costs a Python object and a generator a region; a region may
# pass 24 times a step, so the frame pushes and pops by hand.
push_hooks: Callable[[Any, Any], None] = _autograd_c._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = _autograd_c._pop_saved_tensors_default_hooks
graph_task: Callable[[], int] = torch._C._current_graph_task_id
profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
engine_runs: Callable[[Any], bool] = torch._C._will_engine_execute_node
# The node that this thread's backward pass is running, None outside of one.
running_node: Callable[[], Any] = torch._C._current_autograd_node
# The number that this thread's next autograd node gets.
next_node: Callable[[], int] = torch.autograd._get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]
graph_kept: Callable[[], bool] = _autograd_c._get_current_graph_task_keep_graph
# The innermost saved-tensor hooks of this thread: inner ones hide them, so a region asks them itself.
top_hooks: Callable[[], tuple[Callable[..., Any], Callable[..., Any]] | None] = functools.partial(
    _autograd_c._top_saved_tensors_default_hooks, True
)


def watched() -> bool:
    """Whether saved-tensor hooks or a dispatch mode follow what runs here, as an enclosing region does."""
    return top_hooks() is not None or modes_active() > 0


@contextlib.contextmanager
def hooks_aside() -> Iterator[None]:
    """Take all saved-tensor hooks off for a while: the engine's own use of torch.func would be refused under
    them."""
    taken = []
    while (pair := top_hooks()) is not None:
        pop_hooks()
        taken.append(pair)
    try:
        yield
    finally:
        for pair in reversed(taken):
            push_hooks(*pair)


# The message with which saved-tensor hooks are refused at this point, or None where they work.
hooks_disabled: Callable[[], str | None] = _autograd_c._saved_tensors_hooks_get_disabled_error_message
allow_hooks: Callable[[], None] = _autograd_c._saved_tensors_hooks_enable


@contextlib.contextmanager
def hooks_allowed() -> Iterator[None]:
    """Lift the refusal that `torch.func` puts on saved-tensor hooks.

    Only for hooks whose values are never unpacked: differentiating through hooks under functorch is silently
    wrong (FACTS section 1), watching what is packed is not.
    """
    message = hooks_disabled()
    if message is None:
        yield
        return
    _autograd_c._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        _autograd_c._saved_tensors_hooks_disable(message)


@contextlib.contextmanager
def hooks_as_they_are() -> Iterator[None]:
    """Afterwards saved-tensor hooks are refused as before, or not."""
    message = hooks_disabled()
    try:
        yield
    finally:
        if hooks_disabled() != message:
            if message is None:
                _autograd_c._saved_tensors_hooks_enable()
            else:
                _autograd_c._saved_tensors_hooks_disable(message)


def is_hook_refusal(error: BaseException) -> bool:
    """Whether `error` is torch.func's refusal to run under saved-tensor hooks."""
    return isinstance(error, RuntimeError) and "yet support saved tensor hooks" in str(error)


def engine_grad(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    cotangents: list[torch.Tensor],
    create_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` with `allow_unused`, without its checks, which take a third of a small step's
    time."""
    engine: Any = torch.autograd.Variable._execution_engine
    return engine.run_backward(
        tuple(outputs),
        tuple(cotangents),
        create_graph,
        create_graph,
        tuple(inputs),
        True,
        accumulate_grad=False,
    )


def at_backward_end(callback: Callable[[], None]) -> None:
    """Run `callback` when the running backward pass ends."""
    # 2.15 has torch.autograd.graph.queue_callback; this spelling works on all.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# -- dispatch modes -----------------------------------------------------------------------------------
class DispatchMode(TorchDispatchMode):
    """A dispatch mode without the switch that torch wraps around each of its calls.

    The switch turns Dynamo off inside; it costs more than the rest of a call, and imports Dynamo at the
    first.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in cls.__dict__:
            # torch.cond compiles itself in eager code: Dynamo meets this frame below it, to be left alone.
            frames: Any = torch._C._dynamo.eval_frame  # type: ignore[reportAttributeAccessIssue]
            skip = frames._FrameAction.SKIP
            strategy = frames._FrameExecStrategy(skip, skip)
            frames.set_code_exec_strategy(cls.__dict__["__torch_dispatch__"].__code__, strategy)


def direct_call(op: Any) -> Callable[..., Any]:
    """What calling `op` comes down to, without the Python method in between."""
    return getattr(op, "_op", op)


# The operator that torch.cond calls: what torch-function modes see of it.
cond: Any = cond_op


@contextlib.contextmanager
def uncompiled_branches() -> Iterator[None]:
    """Within, Dynamo looks at nothing, and afterwards it compiles torch.cond again where no mode is active.

    torch.cond has Dynamo look at what it calls. Under a dispatch mode Dynamo leaves those frames, and marks
    their code to be left for good: later calls of torch.cond, without any mode, then fail.
    """
    frames: Any = torch._C._dynamo.eval_frame  # type: ignore[reportAttributeAccessIssue]
    before = frames.set_eval_frame(None)
    try:
        yield
    finally:
        frames.set_eval_frame(before)
        usual = frames._FrameAction.DEFAULT
        for code in torch.cond.__code__.co_consts:
            if isinstance(code, types.CodeType):
                frames.set_code_exec_strategy(code, frames._FrameExecStrategy(usual, usual))


def intercept_under_modes(op: Any, kernel: Callable[..., Any]) -> None:
    """Have `kernel` run in place of an operator on functions where a dispatch mode is active.

    A mode itself is asked below autograd only, when the operator has made its node. `kernel` may return
    NotImplemented; the operator then does what it does without it. `PythonTLSSnapshot` is the key that modes
    add above autograd, for which no operator on functions has a kernel.
    """
    key = torch._C.DispatchKey.PythonTLSSnapshot

    def first(*args: Any, **kwargs: Any) -> Any:
        out = kernel(*args, **kwargs)
        if out is not NotImplemented:
            return out
        keys = _compute_keyset(args, kwargs, op.non_fallthrough_keys.remove(key))
        return op.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)

    op.py_impl(key)(first)


def unseen(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Within, ops on `tensor` reach no dispatch mode; those on a subclass do, which are computed there."""
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    return torch._C._DisableTorchDispatch() if plain else contextlib.nullcontext()


# -- ambient state ------------------------------------------------------------------------------------
# What torch.set_grad_enabled calls, without an object for the way back.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# Whether autocast is on for any device.
autocasting: Callable[[], bool] = torch._C._is_any_autocast_enabled
# What the public readers read; they are called for every region, and are Python functions.
read_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
read_matmul_precision: Callable[[], str] = torch._C._get_float32_matmul_precision
read_flash_sdp: Callable[[], bool] = torch._C._get_flash_sdp_enabled
read_efficient_sdp: Callable[[], bool] = torch._C._get_mem_efficient_sdp_enabled
read_math_sdp: Callable[[], bool] = torch._C._get_math_sdp_enabled
read_cudnn_sdp: Callable[[], bool] = torch._C._get_cudnn_sdp_enabled


def default_device_in_context() -> torch.device | None:
    """The device of an enclosing `with torch.device(...)` or `set_default_device`, None without one."""
    if torch._C._len_torch_function_stack() == 0:
        return None
    from torch.utils import _device

    for i in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(i)
        if isinstance(mode, _device.DeviceContext):
            return mode.device
    return None


def storage_key(tensor: torch.Tensor) -> int:
    """An address that aliases share: the storage object (works for fake tensors, which have no data)."""
    # A pack hook may ask while a torch-function mode is on, which would take this for a call of the user's.
    with functions_as_they_are():
        return tensor.untyped_storage()._cdata


# A context in which no torch-function mode answers for an attribute such as `requires_grad`.
functions_as_they_are: Callable[[], contextlib.AbstractContextManager[None]] = torch._C.DisableTorchFunction
# How many dispatch modes are active, torch's own for tracing included.
modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack


def modes() -> list[TorchDispatchMode]:
    """Those modes, outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return _get_current_dispatch_mode_stack()


_INFRASTRUCTURE = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def memory_is_real() -> bool:
    """Whether new tensors have memory: not while something is traced or tried without data (2.11 to 2.15)."""
    if modes_active() == 0:
        return True
    return all([torch._C._get_dispatch_mode(kind) is None for kind in _INFRASTRUCTURE])


def is_strided(value: Any) -> bool:
    """Whether `value` is a tensor with one block of memory behind it."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def forward_ad_active(tensors: list[torch.Tensor]) -> bool:
    """Whether a plain `forward_ad.dual_level` is open and one of `tensors` has a tangent."""
    if torch.autograd.forward_ad._current_level < 0:
        return False
    return any(_unpack_dual(t, level=0)[1] is not None for t in tensors)


# -- tracing without data -----------------------------------------------------------------------------
def fake_mode(leaves: list[Any]) -> Any:
    """The fake mode of the first fake tensor among `leaves`, else a new one that takes real tensors too."""
    from torch._subclasses import FakeTensor, FakeTensorMode

    for leaf in leaves:
        if isinstance(leaf, FakeTensor):
            # Parameters that a function captures may be real beside fake arguments.
            leaf.fake_mode.allow_non_fake_inputs = True
            return leaf.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no data because it is fake."""
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


@contextlib.contextmanager
def outside_all_modes() -> Iterator[None]:
    """Step out of every dispatch mode and functorch level, so that a trace inside leaves none in theirs."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    message = hooks_disabled()
    # While AOTAutograd traces, hooks are not called at all: that too belongs to what is left.
    tracing = _autograd_c._saved_tensors_hooks_set_tracing(False)
    try:
        with temporarily_clear_interpreter_stack(), _disable_current_modes():
            # The refusal of hooks belongs to the levels that were left.
            with hooks_allowed() if message is not None else contextlib.nullcontext():
                yield
    finally:
        _autograd_c._saved_tensors_hooks_set_tracing(tracing)


def modules_watched() -> bool:
    """Whether any global module hook is set: cheap enough to ask at every recomputation."""
    return bool(_modules._global_forward_pre_hooks or _modules._global_forward_hooks)


@contextlib.contextmanager
def without_module_trackers() -> Iterator[None]:
    """Take the global module hooks of torch's own observers away for a while.

    `FlopCounterMode` and the memory tools follow modules by hooks on gradients, which `torch.autograd.grad`
    refuses for leaves; nor should a trace be counted. Users' global hooks stay: they may run ops. The tables
    of hooks have no public access.
    """
    tables: list[Any] = [
        _modules._global_forward_pre_hooks,
        _modules._global_forward_hooks,
        _modules._global_backward_pre_hooks,
        _modules._global_backward_hooks,
    ]
    before = [list(table.items()) for table in tables]
    for table, hooks in zip(tables, before, strict=True):
        for key, hook in hooks:
            if type(getattr(hook, "__self__", None)).__module__.startswith("torch."):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


def levels() -> list[tuple[int, Any, str]]:
    """The active functorch levels from the outermost: number, kind (GRAD, VMAP, JVP, ...), vmap's
    randomness."""
    found = []
    for level in interpreters():
        kind = level.key()
        chance = _functorch_c.CVmapInterpreterPtr(level).randomness().name.lower() if kind == VMAP else ""
        found.append((level.level(), kind, chance))
    return found


def interpreters() -> list[Any]:
    """The active functorch levels as torch has them, from the outermost."""
    return _functorch_c.get_interpreter_stack() or []


def batch_size(level: Any) -> Any:
    """The batch size, perhaps symbolic, of a vmap's level."""
    return _functorch_c.CVmapInterpreterPtr(level).batchSize()


# -- torch.compile ------------------------------------------------------------------------------------
# What else is private there is in _torch_compiler.
def backend(name: str) -> Callable[..., Any]:
    """The compiler that torch.compile knows as `name`: (graph, inputs) -> callable."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


# -- torch's own planner ------------------------------------------------------------------------------
def partitioner_choice(
    module: torch.fx.GraphModule, results: int, held: list[int], budget: float, solver: str
) -> list[str]:
    """Names of the nodes that torch's min-cut partitioner would save, without extracting the two halves.

    `min_cut_rematerialization_partition` up to the point where the choice is made; `results` counts the
    forward outputs, `held` are positions of the placeholders that are parameters.
    """
    from torch._functorch import config, partitioners
    from torch._functorch.compile_utils import fx_graph_cse

    module.graph.eliminate_dead_code()
    module.graph = fx_graph_cse(module.graph)
    info = partitioners.classify_nodes(module, held, results)
    for node in reversed(module.graph.nodes):
        if node.op == "output":
            node.dist_from_bw = int(1e9)
        elif not info.is_required_fw(node):
            node.dist_from_bw = 0
        else:
            node.dist_from_bw = min([int(1e9), *(user.dist_from_bw + 1 for user in node.users)])
    with config.patch(activation_memory_budget_solver=solver):
        return [
            node.name
            for node in partitioners.choose_saved_values_set(module.graph, info, memory_budget=budget)
        ]
